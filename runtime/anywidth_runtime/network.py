"""A network of many widths, opened from one file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from anywidth_runtime import latency
from anywidth_runtime.bundle_file import Bundle, read_bundle
from anywidth_runtime.contents import Row, TensorInfo, Width, fits
from anywidth_runtime.errors import BundleError, RequestError
from anywidth_runtime.sessions import Sessions

Outputs = np.ndarray | dict[str, np.ndarray]

_SAME_WIDTH = 1e-6


def open(
    path: str | os.PathLike[str],
    *,
    threads: int = 1,
    memory_limit: int = 2**30,
    verified: bool = True,
) -> Network:
    """Open a bundle: one file with a network at many widths.

    Nothing in the file is executed as code. The weights stay in the mapped file. A width is opened
    when it is first used, or in advance by `Network.prepare`.

    Args:
        path: a file written by `anywidth export RUN --out net.anywidth`.
        threads: number of threads per call. With 1, calls from several threads run in parallel.
            With more, all networks of the process share onnxruntime's one thread pool, and other
            sessions of the process must use it too (`use_per_session_threads = False`).
        memory_limit: largest size of the open widths, in bytes; the least recently used width is
            closed first.
        verified: compare the content with its checksum, which reads the whole file once.

    Raises:
        BundleError: the file is damaged, hostile or of another format.

    Example:
        >>> net = anywidth_runtime.open("net.anywidth")
        >>> logits = net.run(images, width=0.4)
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise RequestError(f"threads={threads!r}: expected a whole number of at least 1")
    return Network(read_bundle(path, verified), threads, memory_limit)


class Network:
    """A network of many widths; `anywidth_runtime.open` makes one. Safe to use from many threads.

    Args:
        path: the file.
        widths: its widths, cheapest first: fractions, and names of nonuniform configurations.
        inputs, outputs: name, type and shape of each.
        task: its task, such as "classification"; None if the file does not name one.
        takes: its input, in words.
        facts: further facts in the file, by name.
        accuracy_name: the metric in the table's column of accuracies; None if there is none.
        classes: names of the classes, if the file has them.
    """

    def __init__(self, bundle: Bundle, threads: int, memory_limit: int) -> None:
        contents = bundle.contents
        self._bundle = bundle
        self._sessions = Sessions(bundle, threads, memory_limit)
        self._variants = dict(
            zip((row.width for row in contents.rows), contents.variants, strict=True)
        )
        self._latency = latency.read_latencies(bundle, threads)
        self.path: Path = bundle.path
        self.threads = threads
        self.widths: tuple[Width, ...] = tuple(self._variants)
        self.inputs: tuple[TensorInfo, ...] = contents.inputs
        self.outputs: tuple[TensorInfo, ...] = contents.outputs
        self.task: str | None = contents.task
        self.takes: str = contents.takes
        self.facts: Mapping[str, str] = contents.facts
        self.accuracy_name: str | None = contents.accuracy_name
        self.classes: tuple[str, ...] | None = contents.classes

    @property
    def table(self) -> tuple[Row, ...]:
        """One row per width, cheapest first, with the latency of this machine if measured."""
        rows = self._bundle.contents.rows
        if self._latency is None:
            return rows
        return tuple(replace(row, latency_ms=self._latency.get(row.width)) for row in rows)

    @property
    def is_measured(self) -> bool:
        """Whether latency was measured on this machine with this number of threads."""
        return self._latency is not None

    @property
    def open_widths(self) -> tuple[Width, ...]:
        """The widths that are open."""
        ready = self._sessions.open_variants()
        return tuple(width for width, variant in self._variants.items() if variant in ready)

    def run(self, *arrays: Any, width: Width) -> Outputs:
        """Run the network at a width.

        Args:
            arrays: one array per input, or a dict from input name to array.
            width: one of `widths`; others are refused. `width_for` chooses one.

        Returns the output as an array, or a dict from name to array if there are several.
        """
        feeds = self.check(*arrays)
        session = self._sessions.get(self._variant(width))
        try:
            found = session.run(None, feeds)
        except Exception as error:  # onnxruntime's own have no common class
            reason = str(error).rpartition("Status Message: ")[2].splitlines()[0][:200]
            if isinstance(error, InvalidArgument):  # such as an index outside a table
                raise RequestError(f"width {width} refuses these values ({reason})") from error
            raise BundleError(f"{self.path}: width {width} cannot run ({reason})") from error
        if len(found) == 1:
            return found[0]
        return dict(zip((one.name for one in self.outputs), found, strict=True))

    def prepare(self, widths: Sequence[Width] | None = None) -> None:
        """Open widths (by default all) in advance, so that the first call does not wait."""
        variants = [self._variant(width) for width in (self.widths if widths is None else widths)]
        self._sessions.check_room(variants)
        for variant in dict.fromkeys(variants):
            self._sessions.get(variant)

    def measure(
        self,
        *,
        repeats: int = 20,
        shapes: Sequence[tuple[int, ...]] | None = None,
        progress: bool = True,
        keep: bool = True,
    ) -> tuple[Row, ...]:
        """Time every width on this machine and return the table.

        The widths take turns, so that other work slows all of them alike; the result is the median.
        The times are saved next to the file, in `NAME.latency.json`, and read when it is opened
        again on the same machine with the same number of threads.

        Args:
            repeats: calls per width.
            shapes: the shape of each input; if not given, the shapes from the export.
            progress: show the progress, if the output is a terminal.
            keep: save the times next to the file, if its folder is writable.
        """
        feeds = self.example(shapes)
        self._latency = latency.measured(
            self._bundle, self._sessions, feeds, repeats=repeats, progress=progress
        )
        if keep:
            latency.keep_latencies(self._latency, self._bundle, self.threads)
        return self.table

    def width_for(self, *, milliseconds: float) -> Width:
        """The widest width that takes at most `milliseconds` on this machine; see `measure`."""
        times = self._latency
        if times is None:
            raise RequestError(
                f"{self.path}: latency was not measured on this machine with {self.threads} "
                "threads; call measure() once"
            )
        fitting = [width for width in self.widths if times[width] <= milliseconds]
        if not fitting:
            fastest = min(self.widths, key=times.__getitem__)
            raise RequestError(
                f"no width takes {milliseconds:g} ms or less; the fastest is {fastest}, with "
                f"{times[fastest]:.3g} ms"
            )
        return fitting[-1]

    def resolve(self, width: Width) -> Width:
        """The width as it is in the file; refuses a width that is not."""
        if isinstance(width, np.generic | np.ndarray) and width.ndim == 0:
            width = width.item()
        is_name_or_number = isinstance(width, str | int | float) and not isinstance(width, bool)
        if is_name_or_number and width in self._variants:
            return width
        numbers = [one for one in self.widths if isinstance(one, float)]
        if is_name_or_number and not isinstance(width, str) and numbers:
            near = sorted(numbers, key=lambda one: abs(one - width))
            if abs(near[0] - width) < _SAME_WIDTH:
                return near[0]
            known = " and ".join(f"{one:g}" for one in sorted(near[:2]))
            raise RequestError(f"width {width} is not in {self.path.name}; the nearest are {known}")
        raise RequestError(
            f"width {repr(width)[:60]} is not in {self.path.name}; it has {list(self.widths)[:8]}"
        )

    def check(self, *arrays: Any) -> dict[str, np.ndarray]:
        """The arguments of `run` as input name → array; refuses wrong shapes and types."""
        if len(arrays) == len(self.inputs) == 1 and isinstance(arrays[0], np.ndarray):
            return {self.inputs[0].name: _checked(arrays[0], self.inputs[0])}  # the common case
        names = [one.name for one in self.inputs]
        if len(arrays) == 1 and isinstance(arrays[0], Mapping):
            given = dict(arrays[0])
        else:
            given = dict(zip(names, arrays, strict=False))
            if len(arrays) != len(names):
                raise RequestError(f"{len(arrays)} arrays; expected {len(names)}: {names}")
        if set(given) != set(names):
            raise RequestError(f"arrays for {sorted(map(str, given))}; expected {names}")
        feeds = {one.name: _checked(given[one.name], one) for one in self.inputs}
        self._check_shared_axes(feeds)
        return feeds

    def example(self, shapes: Sequence[tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
        """Random input of these shapes; if not given, of those that latency is measured with."""
        chosen = [one.example for one in self.inputs] if shapes is None else list(shapes)
        if len(chosen) != len(self.inputs):
            raise RequestError(f"{len(chosen)} shapes; expected one per input: {len(self.inputs)}")
        generator = np.random.default_rng(0)
        feeds = {}
        for shape, one in zip(chosen, self.inputs, strict=True):
            # Whole numbers may be indices, of which 0 is always one.
            is_real = one.dtype.startswith("float")
            values = generator.random(shape) if is_real else np.zeros(shape)
            feeds[one.name] = _checked(values.astype(one.dtype), one)
        return feeds

    def close(self) -> None:
        """Close all widths; the next call opens its width again."""
        self._sessions.close()

    def __repr__(self) -> str:
        return f"Network({str(self.path)!r}, {len(self.widths)} widths)"

    def _variant(self, width: Width) -> int:
        return self._variants[self.resolve(width)]

    def _check_shared_axes(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Refuse sizes that differ along an axis of one name: one of size 1 would be repeated."""
        known: dict[str, tuple[str, int]] = {}
        for one in self.inputs:
            for size, axis in zip(feeds[one.name].shape, one.shape, strict=True):
                if isinstance(axis, int):
                    continue
                first, wanted = known.setdefault(axis, (one.name, size))
                if size != wanted:
                    raise RequestError(
                        f"{one.name!r} has {size} along {axis!r} and {first!r} has {wanted}; "
                        "expected as many"
                    )


def _checked(value: Any, wanted: TensorInfo) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        raise RequestError(f"{wanted.name!r} is masked; fill it: value.filled(...)")
    array = np.asarray(value)
    if array.dtype != np.dtype(wanted.dtype):
        raise RequestError(f"{wanted.name!r} has type {array.dtype}; expected {wanted.dtype}")
    if not fits(array.shape, wanted.shape):
        raise RequestError(f"{wanted.name!r} has shape {array.shape}; expected {wanted.shape}")
    if not array.size:
        raise RequestError(f"{wanted.name!r} has shape {array.shape}, which holds nothing")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)
