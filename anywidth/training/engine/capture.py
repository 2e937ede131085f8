"""Capture passes as CUDA graphs, which replay without Python."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class CaptureError(Exception):
    """The reason why a pass cannot be captured."""


class CudaCapture:
    """Graphs in one memory pool, captured on a separate stream."""

    def reaches(self, tensors: Iterable[Tensor]) -> bool:
        """Whether passes over these tensors can be captured."""
        return all(tensor.is_cuda for tensor in tensors)

    def start_anew(self) -> None:
        """Use a new pool and stream for later graphs; existing graphs keep theirs."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def run(self, function: Callable[[], Result]) -> Result:
        """Run on the capturing stream, as a pass must before its first capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call the function once and return a callable that replays its work on the GPU."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Loaders may pin memory from other threads, which "global" would forbid.
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
        """Clean up a failed capture, which PyTorch leaves open: stream, memory, random numbers."""
        torch.cuda.set_stream(before)
        device = before.device_index
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device, self.pool)
        generator = torch.cuda.default_generators[device]
        with contextlib.suppress(RuntimeError, AttributeError):
            generator.graphsafe_set_state(generator.clone_state())


def _let_go(error: BaseException) -> str:
    """The reason why a pass failed. Its results are freed, because later gradients must not meet
    those on the stream of a failed pass.
    """
    first = error.__context__ or error  # the cause, not the failed end of the capture
    lines = str(first).strip().splitlines() or [""]
    for each in (error, first):
        traceback.clear_frames(each.__traceback__)
    return f"{type(first).__name__}: {lines[0]}"
