"""A network, its governor and its queue, as a server uses them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor import Governor
from anywidth_runtime.governor_scheduler import QueueFull, Scheduler, Served, TooLate
from anywidth_runtime.network import Network
from anywidth_runtime.server.counters import Metrics
from anywidth_runtime.server.inference_protocol import Elements, InferenceRequest, Value, Wanted
from anywidth_runtime.server.picture_files import PictureInput, write_png
from anywidth_runtime.server.settings import Settings

_FILE_THREADS = 2


@dataclass(frozen=True)
class Reply:
    """An answer: the requested outputs, and facts about the run."""

    outputs: list[tuple[Wanted, Value]]
    parameters: dict[str, Any]


class Service:
    """Answers inference requests in the order of their deadlines.

    Widths that the governor may choose are opened before the first request, because opening one
    under load would delay every request behind it.
    """

    def __init__(self, network: Network, settings: Settings) -> None:
        self.network = network
        self.settings = settings
        if not network.is_measured:
            network.measure()
        self.governor = Governor.of(
            network,
            least_width=settings.least_width,
            least_accuracy=settings.least_accuracy,
            hysteresis=settings.hysteresis,
            overhead_ms=settings.overhead_ms,
            workers=settings.worker_count,
        )
        network.prepare([choice.width for choice in self.governor.menu])
        self.scheduler = Scheduler(
            self._run,
            self.governor,
            late=settings.late,
            most_waiting=settings.most_waiting,
            workers=settings.worker_count,
        )
        self.metrics = Metrics(lambda: self.scheduler.waiting)
        self.picture_input = PictureInput.of(network)
        self._rows = {row.width: row for row in network.table}
        self._files = ThreadPoolExecutor(_FILE_THREADS, "anywidth-files")

    async def infer(self, request: InferenceRequest, since: float) -> Reply:
        """Answer a request that arrived at `since`, on the scheduler's clock.

        Raises `RequestError` if it is invalid, and its subclasses `QueueFull` and `TooLate`.
        """
        wanted, asked = self._wanted(request), request.parameters
        width = None if asked.width is None else self.network.resolve(asked.width)
        # A request for a width gets that width, however long it takes.
        usual = self.settings.deadline_ms if width is None else math.inf
        patience = asked.deadline_ms or usual
        try:
            pictures = await self._pictures(request.files, since + patience / 1000)
            arrays = self.network.check({**request.tensors, **pictures})
            size = self._size(arrays)
            served = await asyncio.wrap_future(
                self.scheduler.submit(
                    arrays,
                    deadline_ms=patience,
                    width=width,
                    size=size,
                    since=since,
                )
            )
        except TooLate:
            self.metrics.dropped()
            raise
        except QueueFull:
            self.metrics.turned_away("refused")
            raise
        outputs = [(one, await self._shaped(one, served.answer[one.name])) for one in wanted]
        return Reply(outputs, self._noted(served, since, size))

    def close(self, timeout: float | None = None) -> bool:
        """Answer waiting requests and end the threads; returns whether all were answered."""
        is_done = self.scheduler.close(timeout)
        self._files.shutdown(wait=is_done, cancel_futures=not is_done)
        return is_done

    def _run(self, values: Sequence[Any], width: float | str) -> list[dict[str, np.ndarray]]:
        (arrays,) = values
        found = self.network.run(arrays, width=width)
        return [found if isinstance(found, dict) else {self.network.outputs[0].name: found}]

    def _noted(self, served: Served, since: float, size: float) -> dict[str, Any]:
        """Count an answer and describe its run."""
        milliseconds = 1000 * (self.scheduler.clock() - since)
        self.metrics.served(served.width, milliseconds, served.run_ms, is_in_time=served.is_in_time)
        return {
            "width": served.width,
            "milliseconds": round(milliseconds, 3),
            "waited_ms": round(served.waited_ms, 3),
            "run_ms": round(served.run_ms, 3),
            "in_time": served.is_in_time,
            "multiply_adds": round(size * self._rows[served.width].macs),
        }

    def _size(self, arrays: Mapping[str, np.ndarray]) -> float:
        """The work of a request relative to the example that latency was measured with."""
        first = self.network.inputs[0]
        return arrays[first.name].size / math.prod(first.example)

    async def _pictures(
        self, files: Mapping[str, list[bytes]], deadline: float
    ) -> dict[str, np.ndarray]:
        """Decode image files, unless the request is late already."""
        if not files:
            return {}
        takes = self.picture_input
        if takes is None:
            raise RequestError(f"this network takes no image files: it takes {self.network.takes}")
        if set(files) != {takes.name}:
            raise RequestError(f"image files for {sorted(files)}: expected {takes.name!r}")
        loop = asyncio.get_running_loop()
        most, drops = self.settings.most_pixels, self.settings.late == "drop"

        def decode(file: bytes) -> np.ndarray:
            if drops and self.scheduler.clock() >= deadline:
                raise TooLate("the deadline passed while the request waited to be decoded")
            return takes.read(file, most)

        read = [await loop.run_in_executor(self._files, decode, one) for one in files[takes.name]]
        if len({array.shape for array in read}) != 1:
            sizes = [f"{array.shape[3]} x {array.shape[2]}" for array in read]
            raise RequestError(f"images of several sizes, {sizes}: send one request per size")
        return {takes.name: np.concatenate(read) if len(read) > 1 else read[0]}

    def _wanted(self, request: InferenceRequest) -> list[Wanted]:
        names = [one.name for one in self.network.outputs]
        if not request.outputs:
            return [Wanted(name, request.parameters.binary_data_output) for name in names]
        for one in request.outputs:
            if one.name not in names:
                raise RequestError(f"no output {one.name!r}: there are {names}")
        return list(request.outputs)

    async def _shaped(self, wanted: Wanted, value: np.ndarray) -> Value:
        if wanted.classes:
            return self._classified(value, wanted.classes)
        if wanted.encoding == "png":
            if value.ndim != 4 or value.shape[1] not in (1, 3):
                raise RequestError(f"{wanted.name!r} has shape {value.shape}: not a picture's")
            loop = asyncio.get_running_loop()
            files = [await loop.run_in_executor(self._files, write_png, one) for one in value]
            return Elements(files, (len(files),))
        return value

    def _classified(self, value: np.ndarray, count: int) -> Elements:
        """`value:index:name` of the largest values, as Triton's clients expect them."""
        names = self.network.classes or ()
        rows = value.reshape(len(value), -1)
        count = min(count, rows.shape[1])
        found = []
        for row in rows:
            for index in np.argsort(-row, kind="stable")[:count]:
                name = f":{names[index]}" if index < len(names) else ""
                found.append(f"{row[index]:.6f}:{index}{name}".encode())
        return Elements(found, (len(rows), count))
