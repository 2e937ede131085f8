"""Starts a server: of one process, or of Ray's replicas."""

from __future__ import annotations

from pathlib import Path

from anywidth_runtime.errors import RequestError
from anywidth_runtime.server.settings import Settings


def start(
    bundle: Path,
    settings: Settings,
    *,
    host: str,
    port: int,
    with_ray: bool = False,
    replicas: int = 1,
    most_replicas: int | None = None,
    target_width: float | None = None,
) -> None:
    """Serves a bundle until the process is told to end."""
    if not 0 <= port < 2**16:
        raise RequestError(f"port {port}: expected 1 to 65535, or 0 for any that is free")
    if with_ray:
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
        raise RequestError("--replicas, --most-replicas and --target-width go with --ray")
    from anywidth_runtime.server.running import serve

    serve(bundle, settings, host=host, port=port)
