"""Settings for every test: one thread, the same random numbers each time."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings

from anywidth.app.data.arrays import load_arrays

# Threads that wait for each other on busy cores take several times as long.
torch.set_num_threads(1)

# The same examples each time, however long one takes on a busy machine.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def images_unpacked_once() -> Iterator[None]:
    """For modules that train many times on the bundled images, which take long to unpack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anywidth.app.data.classification.load_arrays", cache(load_arrays))
        yield


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
