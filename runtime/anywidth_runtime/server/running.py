"""Start and stop the server: in this process, or in replicas of Ray."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from anywidth_runtime.errors import RequestError
from anywidth_runtime.network import open as open_network
from anywidth_runtime.server.application import make_app
from anywidth_runtime.server.service import Service
from anywidth_runtime.server.settings import Settings, model_name, read_token
from anywidth_runtime.short_pauses import shorten_pauses

_GRACE_SECONDS = 30


def start(
    bundle: Path,
    *,
    host: str,
    port: int,
    name: str | None,
    token_file: Path | None,
    ray: bool = False,
    replicas: int = 1,
    most_replicas: int | None = None,
    target_width: float | None = None,
    **options: Any,
) -> None:
    """Serve a bundle until the process is told to end; `options` are fields of `Settings`."""
    token = read_token(token_file)
    settings = Settings(name=name or model_name(bundle), token=token, **options)
    if not 0 <= port < 2**16:
        raise RequestError(f"port {port}: expected 1 to 65535, or 0 for any that is free")
    if ray:
        from anywidth_runtime.ray_serving import serve_with_ray

        serve_with_ray(
            bundle,
            settings,
            host=host,
            port=port,
            replicas=replicas,
            most_replicas=most_replicas,
            target_width=target_width,
        )
        return
    if replicas != 1 or most_replicas is not None or target_width is not None:
        raise RequestError("--replicas, --most-replicas and --target-width need --ray")
    serve(bundle, settings, host=host, port=port)


def serve(path: Path, settings: Settings, *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve a bundle until SIGTERM or Ctrl-C.

    Then it accepts no more connections, answers every request it has, and returns.
    """
    network = open_network(path, threads=settings.threads)
    service = Service(network, settings)
    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        server_header=False,
    )
    shorten_pauses()
    try:
        with _ending_well():
            _Server(config, service).run()
    finally:
        service.close(timeout=_GRACE_SECONDS)


@contextlib.contextmanager
def _ending_well() -> Iterator[None]:
    """Unlike uvicorn, do not raise the signal again: a server told to end has not failed."""
    told = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in told}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """Print the address as soon as the server listens."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        if not self.should_exit:
            print("\n".join(self._said()), flush=True)

    def _said(self) -> list[str]:
        settings, menu = self._service.settings, self._service.governor.menu
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        widths = ", ".join(f"{one.width} ({one.milliseconds:.3g} ms)" for one in menu)
        lines = [
            f"Serving {self._service.network.path} at {address}",
            f"  inference  POST {address}/v2/models/{settings.name}/infer",
            f"  reference  {address}/docs",
            f"  metrics    {address}/metrics",
            f"Governed widths: {widths}",
        ]
        if settings.has_page:
            lines.insert(1, f"  page       {address}/")
        if not settings.token and host not in ("127.0.0.1", "::1"):
            lines.append("Anybody who can reach this address can use it; see --token-file")
        return lines
