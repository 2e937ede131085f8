"""The number of replicas of Ray Serve: enough to serve the requested width.

Ray copies this file into its controller, so it imports nothing else of this package.
"""

from __future__ import annotations

from typing import Any

_MOST_BUSY = 0.7
"""The remaining replicas must not be busier than this after one is removed."""


def replicas_for_width(context: Any) -> tuple[int, dict[str, Any]]:
    """One more while the mean width served is below its target, one fewer while that is safe.

    Ray enforces the least and the largest number of replicas, and waits before it acts
    (`upscale_delay_s`, `downscale_delay_s`).

    Args:
        context: Ray's `AutoscalingContext`, with the records of each replica.
    """
    recorded = context.aggregated_metrics or {}
    widths, targets, busy = (
        list(recorded.get(name, {}).values()) for name in ("mean_width", "target_width", "busy")
    )
    wanted = context.target_num_replicas
    if not widths or not targets:
        return wanted, {}
    if sum(widths) / len(widths) < max(targets):
        wanted += 1
    elif wanted > 1 and sum(busy) < _MOST_BUSY * (wanted - 1):
        wanted -= 1
    least = context.capacity_adjusted_min_replicas
    most = context.capacity_adjusted_max_replicas
    return min(most, max(least, wanted)), {}
