"""Ctrl-C with several ranks is heard at the next exchange, not in the middle of one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from anywidth import distributed
from anywidth.distributed import stops_together


@pytest.fixture
def _heard() -> Iterator[None]:
    """A background shell's tests ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
def test_a_rank_notes_an_interrupt_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with stops_together() as is_stopped:
        assert not is_stopped()
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        assert not is_stopped()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("_heard")
def test_a_single_process_is_interrupted_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), stops_together():
        signal.raise_signal(signal.SIGINT)
