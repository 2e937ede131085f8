"""Bundles to serve, and real servers on this machine's own address."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anywidth_runtime
import numpy as np
import torch
import uvicorn
from anywidth_runtime.server.application import make_app
from anywidth_runtime.server.service import Service
from anywidth_runtime.server.settings import Settings
from command_line import environment
from tiny_networks import batches_of, converted
from torch import nn

import anywidth as aw

HANGS_AFTER = 60.0
HEAVY_PIXELS = 96


def write_tiny_bundle(folder: Path) -> Path:
    """A classifier of (1, 12, 12) images at three widths, measured."""
    path = folder / "tiny.anywidth"
    model = converted()
    aw.calibrate(model, batches_of([16]), widths=[0.25, 0.5, 1.0])
    aw.export_bundle(model, path, [0.25, 0.5, 1.0])
    anywidth_runtime.open(path).measure(repeats=3, progress=False)
    return path


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


class Running(NamedTuple):
    """A server that runs."""

    service: Service
    port: int

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request, on a connection of its own."""
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS_AFTER)
        ) as connection:
            sent = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, sent, dict(headers or {}))
            reply = connection.getresponse()
            return Reply(reply.status, dict(reply.getheaders()), reply.read())

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return self.request("GET", path, headers=headers)

    def infer(self, body: Any, headers: Mapping[str, str] | None = None, query: str = "") -> Reply:
        path = f"/v2/models/{self.service.settings.name}/infer{query}"
        return self.request("POST", path, body, headers)


@contextlib.contextmanager
def served(bundle: Path, **settings: Any) -> Iterator[Running]:
    """A server in a thread of this process, at any free port."""
    service = Service(anywidth_runtime.open(bundle), Settings(**{"workers": 1, **settings}))
    config = uvicorn.Config(make_app(service), host="127.0.0.1", port=0, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + HANGS_AFTER
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)
    try:
        yield Running(service, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(HANGS_AFTER)
        assert not thread.is_alive()


def write_heavy_bundle(folder: Path) -> Path:
    """A network that takes about ten times as long at its widest as at its narrowest."""
    path = folder / "heavy.anywidth"
    layers = nn.Sequential(
        nn.Conv2d(1, 160, 3, 2, 1), nn.ReLU(), nn.Conv2d(160, 160, 3, 1, 1), nn.ReLU(),
        nn.Conv2d(160, 160, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(160, 10),
    )  # fmt: skip
    example = torch.randn(2, 1, HEAVY_PIXELS, HEAVY_PIXELS)
    model = aw.slimmable(layers, None, aw.WidthRange(0.25, 1.0, 8), example_input=example)
    aw.export_bundle(model.eval(), path, [0.25, 0.5, 0.75, 1.0])
    anywidth_runtime.open(path).measure(repeats=5, progress=False)
    return path


def heavy_body(**parameters: Any) -> tuple[bytes, int]:
    """A request for the heavy network, and how much of it is JSON."""
    image = np.zeros((1, 1, HEAVY_PIXELS, HEAVY_PIXELS), np.float32).tobytes()
    tensor = {
        "name": "input",
        "shape": [1, 1, HEAVY_PIXELS, HEAVY_PIXELS],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(image)},
    }
    text = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return text + image, len(text)


@contextlib.contextmanager
def serving_process(
    bundle: Path, *options: object, module: str = "anywidth_runtime"
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`python -m anywidth_runtime serve BUNDLE` in a process of its own, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "serve", str(bundle), "--port", "0", *map(str, options)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r":(\d+)$", first.strip())
        assert found, (first, process.communicate(timeout=HANGS_AFTER)[1])
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()
