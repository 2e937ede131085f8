"""The server on many machines with Ray Serve: each replica has its own queue and governor.

Ray passes requests on; the replica in whose queue a request waits chooses its width.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anywidth_runtime.errors import RequestError
from anywidth_runtime.network import Network
from anywidth_runtime.network import open as open_network
from anywidth_runtime.short_pauses import shorten_pauses

if TYPE_CHECKING:
    from anywidth_runtime.server.settings import Settings

# The time of a request in Ray itself, both ways, which the governor leaves free.
_OVERHEAD_MS = 6.0
_STATISTICS_SECONDS = 10.0


def ray_app(
    bundle: str | os.PathLike[str],
    settings: Settings | None = None,
    *,
    replicas: int = 1,
    most_replicas: int | None = None,
    target_width: float | None = None,
    upscale_delay_s: float = 10.0,
    downscale_delay_s: float = 300.0,
    cpus: float = 1.0,
    opener: Callable[[str], Network] | None = None,
) -> Any:
    """A Ray Serve application that serves a bundle: `serve.run(ray_app("net.anywidth"))`.

    Args:
        bundle: the file, with the same path on every machine.
        settings: as for `anywidth serve`; by default one worker per replica.
        replicas: number of replicas; the least number if `most_replicas` is given.
        most_replicas: the largest number. A replica is added while the mean width served is below
            `target_width`, and removed while the others are idle enough.
        target_width: if not given, three quarters of the way from the narrowest to the widest.
        upscale_delay_s: seconds for which the width must have been too narrow.
        downscale_delay_s: seconds for which replicas must have been idle.
        cpus: number of CPUs that Ray reserves per replica.
        opener: opens the bundle in a replica, instead of `anywidth_runtime.open`.
    """
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    from anywidth_runtime.ray_scaling import replicas_for_width
    from anywidth_runtime.server.settings import Settings, model_name

    most = replicas if most_replicas is None else most_replicas
    if not 1 <= replicas <= most:
        raise RequestError(
            f"replicas={replicas}, most_replicas={most}: expected 1 <= least <= most"
        )
    path = str(Path(bundle).resolve())
    chosen = settings or Settings(name=model_name(Path(path)), workers=1)
    # The page would show the load of only one replica.
    chosen = dataclasses.replace(
        chosen, workers=chosen.workers or 1, overhead_ms=_OVERHEAD_MS, has_load=False
    )
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if most > replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas,
                max_replicas=most,
                upscale_delay_s=upscale_delay_s,
                downscale_delay_s=downscale_delay_s,
                policy=AutoscalingPolicy(policy_function=replicas_for_width),
            )
        }
    deployment = serve.deployment(
        name="anywidth",
        # The queue is in the replica: Ray passes every request on immediately.
        max_ongoing_requests=chosen.most_waiting + 64,
        max_queued_requests=chosen.most_waiting,
        ray_actor_options={"num_cpus": cpus},
        **scaling,
    )(serve.ingress()(Replica))
    return deployment.bind(path, chosen, target_width, opener)


class Replica:
    """One server under Ray: a network, its queue and its governor."""

    def __init__(
        self,
        path: str,
        settings: Settings,
        target_width: float | None,
        opener: Callable[[str], Network] | None,
    ) -> None:
        from anywidth_runtime.server.service import Service

        network = opener(path) if opener else open_network(path, threads=settings.threads)
        self._service = Service(network, settings)
        numbers = [one for one in network.widths if isinstance(one, float)]
        lowest, self._widest = min(numbers, default=1.0), max(numbers, default=1.0)
        usual = lowest + 0.75 * (self._widest - lowest)
        self._target = usual if target_width is None else target_width
        shorten_pauses()

    def __serve_build_asgi_app__(self) -> Any:
        from anywidth_runtime.server.application import make_app

        return make_app(self._service)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The numbers that `replicas_for_width` uses: those of the last ten seconds."""
        moments = self._service.metrics.recent(_STATISTICS_SECONDS)
        widths = [one.width for one in moments if isinstance(one.width, float)]
        # A dropped request had no width.
        missed = sum(one.width is None for one in moments)
        mean = sum(widths) / (len(widths) + missed) if moments else self._widest
        runs = sum(one.run_ms for one in moments) / 1000
        workers = self._service.settings.worker_count
        busy = min(1.0, runs / (_STATISTICS_SECONDS * workers))
        return {"mean_width": mean, "target_width": self._target, "busy": busy}


def serve_with_ray(
    bundle: Path, settings: Settings, *, host: str, port: int, **options: Any
) -> None:
    """`anywidth serve --ray`: join the Ray cluster at RAY_ADDRESS, or start one here.

    Returns after SIGTERM or Ctrl-C, when all accepted requests are answered.
    """
    import ray
    from ray import serve

    open_network(bundle)  # report a faulty file here rather than in a replica
    app = ray_app(bundle, settings, **options)
    ray.init(log_to_driver=False, logging_level=logging.WARNING)
    serve.start(
        http_options={"host": host, "port": port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    serve.run(app, name=settings.name, route_prefix="/")
    # After Ray has set its own handlers, which would end the process immediately.
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    print(f"Serving {bundle} with Ray Serve at http://{host}:{port}", flush=True)
    told.wait()
    # Only this application: the cluster may serve others.
    serve.delete(settings.name)
    ray.shutdown()
