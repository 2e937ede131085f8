"""Start a server in one process, or in replicas of Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anywidth_runtime.errors import RequestError
from anywidth_runtime.server.settings import Settings, model_name, read_token


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
    from anywidth_runtime.server.running import serve

    serve(bundle, settings, host=host, port=port)
