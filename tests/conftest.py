"""Settings for every test: one thread, the same random numbers each time."""

from collections.abc import Iterator

import pytest
import torch

# Threads that wait for each other on busy cores take several times as long.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
