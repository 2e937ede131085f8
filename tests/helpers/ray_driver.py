"""Serves a bundle with Ray on this machine, for tests: python ray_driver.py BUNDLE PORT."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import anywidth_runtime
from anywidth_runtime.contents import Row
from anywidth_runtime.server.settings import Settings

SECONDS_AT_FULL_WIDTH = 0.12


class Sleepy:
    """A network that takes as long as its width says, and no processor: the machine is small."""

    is_measured = True

    def __init__(self, network: anywidth_runtime.Network) -> None:
        self._network = network

    @property
    def table(self) -> tuple[Row, ...]:
        slow = 1000 * SECONDS_AT_FULL_WIDTH
        return tuple(
            replace(row, latency_ms=slow * float(row.width)) for row in self._network.table
        )

    def run(self, *arrays: Any, width: float) -> Any:
        time.sleep(SECONDS_AT_FULL_WIDTH * width)
        return self._network.run(*arrays, width=width)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def open_sleepy(path: str) -> Any:
    return Sleepy(anywidth_runtime.open(path))


def main() -> None:
    import ray
    from ray import serve

    bundle, port = sys.argv[1], int(sys.argv[2])
    # Logical: four replicas of a quarter each, whatever the machine has.
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = anywidth_runtime.ray_app(
        bundle,
        Settings(workers=1),
        replicas=2,
        cpus=0.1,
        opener=open_sleepy,  # type: ignore[arg-type]
    )
    serve.run(app, route_prefix="/")
    print("ready", flush=True)
    sys.stdin.readline()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
