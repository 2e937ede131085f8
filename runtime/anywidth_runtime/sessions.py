"""Open widths: one onnxruntime session per graph; the least recently used is closed first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from functools import cache

import onnxruntime
from onnxruntime import InferenceSession

from anywidth_runtime.bundle_file import Bundle
from anywidth_runtime.errors import BundleError, RequestError

_pool_lock = threading.Lock()
_pool_threads: int | None = None


class Sessions:
    """Sessions of one bundle, safe to use from many threads.

    The file has the weights once, but every open session has its own copy in a faster layout.
    `memory_limit` bounds these copies, in bytes; one session may always be open.
    """

    def __init__(self, bundle: Bundle, threads: int, memory_limit: int) -> None:
        self.bundle = bundle
        self.threads = threads
        self.memory_limit = memory_limit
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Future[InferenceSession]] = OrderedDict()
        if threads > 1:
            _share_threads(threads)

    def get(self, variant: int) -> InferenceSession:
        """The session of one graph, opened if necessary; other threads that need it wait."""
        with self._lock:
            waiting = self._open.get(variant)
            if waiting is not None:
                self._open.move_to_end(variant)
            else:
                opened = self._open[variant] = Future()
                self._close_oldest()
        if waiting is not None:
            return waiting.result()
        try:
            opened.set_result(_open_session(self.bundle, variant, self.threads))
        except BaseException as error:
            with self._lock:
                if self._open.get(variant) is opened:
                    del self._open[variant]
            opened.set_exception(error)
        return opened.result()

    def open_variants(self) -> set[int]:
        with self._lock:
            return {variant for variant, session in self._open.items() if session.done()}

    def check_room(self, variants: Iterable[int]) -> None:
        """Refuse to open more than the memory limit allows."""
        needed = sum(self.bundle.variants[variant].memory for variant in set(variants))
        if needed > self.memory_limit:
            raise RequestError(
                f"these widths need {needed / 1e6:.0f} MB open at once and memory_limit is "
                f"{self.memory_limit / 1e6:.0f} MB: prepare fewer, or open the file with more"
            )

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _close_oldest(self) -> None:
        """Drop sessions until the others fit; a running session is freed when its call ends."""
        sizes = {variant: self.bundle.variants[variant].memory for variant in self._open}
        while len(self._open) > 1 and sum(sizes.values()) > self.memory_limit:
            oldest, _ = self._open.popitem(last=False)
            del sizes[oldest]


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """The options of every session."""
    if threads == 1 and _pool_threads is not None:
        raise RequestError(
            f"threads=1: another network of this process was opened with threads={_pool_threads}, "
            "and all share that pool; open this one with as many"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    _share_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if threads > 1:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def _open_session(bundle: Bundle, variant: int, threads: int) -> InferenceSession:
    options = session_options(threads)
    weights = bundle.weights(variant)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    if weights:
        options.add_external_initializers(list(weights), values)
    try:
        session = InferenceSession(
            bundle.variants[variant].graph,
            options,
            providers=["CPUExecutionProvider"],
            enable_fallback=False,  # otherwise it prints and retries with the same provider
        )
    except Exception as error:  # onnxruntime's own have no common class
        reason = str(error).splitlines()[0][:200]
        raise BundleError(f"{bundle.path}: onnxruntime refuses a graph ({reason})") from error
    _check_signature(bundle, session)
    return session


def _check_signature(bundle: Bundle, session: InferenceSession) -> None:
    contents = bundle.contents
    for kind, told, found in (
        ("inputs", contents.inputs, session.get_inputs()),
        ("outputs", contents.outputs, session.get_outputs()),
    ):
        names = [one.name for one in told]
        if names != [one.name for one in found]:
            raise BundleError(f"{bundle.path}: a graph whose {kind} are not {names[:5]}")


@cache
def _share_arena() -> None:
    """One memory arena for the activations of all widths: as fast as one each, and less memory.

    Weights are outside it, so that closing a width frees its memory.
    """
    kind, memory = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    info = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, memory)
    onnxruntime.create_and_register_allocator(info, None)


def _share_threads(threads: int) -> None:
    """Create the thread pool of the process; onnxruntime has only one, of a fixed size."""
    global _pool_threads
    with _pool_lock:
        if _pool_threads is None:
            try:
                onnxruntime.set_global_thread_pool_sizes(threads, 1)
            except Exception as error:
                raise RequestError(
                    f"threads={threads}: this process has a thread pool of onnxruntime already"
                ) from error
            _pool_threads = threads
        elif _pool_threads != threads:
            raise RequestError(
                f"threads={threads}: all networks of a process share one pool, and it has "
                f"{_pool_threads} threads"
            )
