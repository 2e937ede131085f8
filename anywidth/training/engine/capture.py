"""Passes captured as CUDA graphs, to be replayed without Python."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class CaptureError(Exception):
    """Why a pass cannot be captured."""


class CudaCapture:
    """Graphs that live in one memory pool, captured on a stream of their own."""

    def reaches(self, tensors: Iterable[Tensor]) -> bool:
        """Whether passes over these can be captured."""
        return all(tensor.is_cuda for tensor in tensors)

    def start_anew(self) -> None:
        """A pool and a stream for graphs to come; those of before keep theirs."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def run(self, function: Callable[[], Result]) -> Result:
        """Runs on the stream that captures, as a pass must before its first capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """What replays the function's work on the GPU; the function is called once, for that."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Loaders pin memory from threads of their own meanwhile, which "global" would forbid.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                function()
        except Exception as error:
            self._close(before)
            raise CaptureError(_let_go(error)) from None
        replay: Callable[[], None] = graph.replay
        return replay

    def _close(self, before: torch.cuda.Stream) -> None:
        """PyTorch leaves a failed capture half open: its stream, allocations, random numbers."""
        torch.cuda.set_stream(before)
        device = before.device_index
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device, self.pool)
        generator = torch.cuda.default_generators[device]
        with contextlib.suppress(RuntimeError, AttributeError):
            generator.graphsafe_set_state(generator.clone_state())


def _let_go(error: BaseException) -> str:
    """Why a pass failed. What it computed is freed: gradients of a network must not meet on the
    stream of a pass that is over.
    """
    first = error.__context__ or error  # what failed, not that the capture ended badly
    lines = str(first).strip().splitlines() or [""]
    for each in (error, first):
        traceback.clear_frames(each.__traceback__)
    return f"{type(first).__name__}: {lines[0]}"
