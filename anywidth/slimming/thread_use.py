"""A network has one width at a time: using it from two threads at once is refused.

Inside `at_width` a network belongs to the thread that opened the block, and during a pass no other
thread may change its width.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from anywidth.errors import AnywidthError
from anywidth.width import ChannelConfig


class Thread:
    """The use of one network by one thread."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.changes = 0  # of the width, by this thread
        self.set: tuple[ChannelConfig, int] | None = None  # by `set_width`; changes by others then


class Block:
    """An `at_width` block that is open."""

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.expected = thread.set


# The blocks around the code that runs. An asyncio task has its own, as a thread has, and
# `asyncio.to_thread` takes them along.
_AROUND: ContextVar[tuple[Block, ...]] = ContextVar("anywidth_blocks", default=())


class ThreadUse:
    """Which threads use a network; each of its records refers to it."""

    def __init__(self) -> None:
        # A garbage collector may end a block while this thread begins another.
        self.lock = threading.RLock()
        self.block: Block | None = None  # the innermost one
        self._blocks: list[Block] = []
        self._passes = Counter[int]()  # by thread: how many of them have begun
        self._changes = 0
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadUse, ()

    def thread(self) -> Thread:
        """The record of the running thread."""
        try:
            return self._local.thread
        except AttributeError:
            self._local.thread = found = Thread()
            return found

    def check(self, thread: Thread | None = None) -> None:
        """Raise if another thread is inside `at_width`.

        `thread` is the one for which the running thread works, if that is known: backward passes on
        a GPU have threads of their own.
        """
        block = self.block
        if block is None or block in _AROUND.get() or block.thread is thread:
            return
        if thread is None and torch._C._current_graph_task_id() != -1:
            return
        raise _refused("another thread uses it inside anywidth.at_width")

    def begin_pass(self, config: ChannelConfig) -> None:
        with self.lock:
            self.check()
            thread = self.thread()
            if self.block is None and thread.set is not None:
                expected, others = thread.set
                if expected != config and others != self._changes - thread.changes:
                    raise _refused(
                        "another thread has set another width since this thread called "
                        "anywidth.set_width"
                    )
            self._passes[thread.ident] += 1

    def end_pass(self) -> None:
        with self.lock:
            self._passes -= Counter([threading.get_ident()])  # which keeps no count of 0

    def change(self, network: nn.Module, thread: Thread | None = None) -> None:
        """Before the width is written, with the lock."""
        self.check(thread)
        self._check_passes(network, thread)
        self._changes += 1
        (thread or self.thread()).changes += 1

    def enter(self, network: nn.Module, thread: Thread | None = None) -> Block:
        """Keep all other threads out; blocks of one thread may be nested."""
        with self.lock:
            self.check(thread)
            self._check_passes(network, thread)
            block = self.block = Block(thread or self.thread())
            self._blocks.append(block)
        _AROUND.set((*_AROUND.get(), block))
        return block

    def leave(self, block: Block) -> None:
        is_innermost = self.block is block
        block.thread.set = block.expected
        self._blocks.remove(block)
        self.block = self._blocks[-1] if self._blocks else None
        _AROUND.set(tuple(one for one in _AROUND.get() if one is not block))
        if not is_innermost:  # for example, two generators that take turns
            raise AnywidthError(
                "an at_width block ended before another one that began inside it, so passes may "
                "have had the wrong width: give each block its own network, "
                "anywidth.replica(model)"
            )

    def keep(self, config: ChannelConfig) -> None:
        """Note that this thread expects a width until it sets another."""
        thread = self.thread()
        thread.set = config, self._changes - thread.changes

    def _check_passes(self, network: nn.Module, thread: Thread | None) -> None:
        """Raise if another thread is in the middle of a pass."""
        if not self._passes:
            return
        mine = (threading.get_ident(), None if thread is None else thread.ident)
        for ident in [one for one in self._passes if one not in mine]:
            if _is_running(network, ident):
                raise _refused("another thread runs it")
            del self._passes[ident]  # that pass has failed


def _is_running(network: nn.Module, ident: int) -> bool:
    """Whether a thread is inside a call of a network."""
    innermost = sys._current_frames().get(ident)
    call = nn.Module._call_impl.__code__
    return innermost is not None and any(
        frame.f_code is call and frame.f_locals.get("self") is network
        for frame, _ in traceback.walk_stack(innermost)
    )


def _refused(reason: str) -> AnywidthError:
    return AnywidthError(
        f"this network has one width at a time, and {reason}: give each thread its own network, "
        "anywidth.replica(model), which shares the memory of this one"
    )
