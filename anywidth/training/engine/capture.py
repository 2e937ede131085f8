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
    """Graphs in one memory pool, captured on a separate stream.

    The first capture in a pool takes the memory that the following ones use again: the engine
    captures the widest configuration first. PyTorch's own way of capturing waits for the device and
    gives all unused memory back before every capture; here only the first does.
    """

    def reaches(self, tensors: Iterable[Tensor]) -> bool:
        """Whether passes over these tensors can be captured."""
        return all(tensor.is_cuda for tensor in tensors)

    def start_anew(self) -> None:
        """Use a new pool and stream for later graphs; existing graphs keep theirs."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.has_memory = False  # whether the pool was filled by a capture

    def run(self, function: Callable[[], Result]) -> Result:
        """Run on the capturing stream, as a pass must before its first capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call the function once and return a callable that replays its work on the GPU."""
        if self.has_memory:
            try:
                return self._captured(function)
            except Exception as error:
                reason = _let_go(error)
                if not _is_out_of_memory(error):
                    raise CaptureError(reason) from None
        self._free_unused()
        try:
            replay = self._captured(function)
        except Exception as error:
            raise CaptureError(_let_go(error)) from None
        self.has_memory = True
        return replay

    def _free_unused(self) -> None:
        """Give unused memory back to the device, which PyTorch cannot do during a capture."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _captured(self, function: Callable[[], None]) -> Callable[[], None]:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.stream(self.stream):
                # Loaders may pin memory from other threads, which "global" would forbid.
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        except Exception:
            self._close(before)
            raise
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


def _is_out_of_memory(error: BaseException) -> bool:
    return any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__context__))


def _let_go(error: BaseException) -> str:
    """The reason why a pass failed. Its results are freed, because later gradients must not meet
    those on the stream of a failed pass.
    """
    first = error.__context__ or error  # the cause, not the failed end of the capture
    lines = str(first).strip().splitlines() or [""]
    for each in (error, first):
        traceback.clear_frames(each.__traceback__)
    return f"{type(first).__name__}: {lines[0]}"
