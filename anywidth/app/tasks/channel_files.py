"""Channels in a file: JSON with the number of channels per group, as `anywidth search` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anywidth.errors import AnywidthError, errors_about
from anywidth.files import read_json
from anywidth.planning.groups import Plan
from anywidth.width import ChannelConfig, whole_number


def read_channels(path: Path) -> ChannelConfig:
    """The channels in a file; whether they are those of a network is checked with its plan."""
    return _checked(read_json(path), str(path))


def channels_to_text(channels: ChannelConfig) -> str:
    """As a run's settings keep them, so that a run does not depend on the file."""
    return json.dumps(channels.to_json(), separators=(",", ":"))


def channels_from_text(text: str) -> ChannelConfig:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AnywidthError(f"channels={text[:60]!r}: not JSON ({error})") from error
    return _checked(data, f"channels={text[:60]!r}")


def check_within(channels: ChannelConfig, plan: Plan, where: str) -> ChannelConfig:
    """The channels in the order of the plan; refuses those of another network or range."""
    with errors_about(where):
        found = plan.resolve(channels)
    narrowest, widest = plan.narrowest, plan.widest
    for group in plan.elastic():
        least, most = narrowest[group.name], widest[group.name]
        if not least <= found[group.name] <= most:
            raise AnywidthError(
                f"{where}: group {group.name!r} has {found[group.name]} channels, but the network "
                f"was trained with {least} to {most}; choose a number between them"
            )
    return found


def _checked(data: Any, where: str) -> ChannelConfig:
    if isinstance(data, Mapping) and "found" in data:
        raise AnywidthError(
            f"{where}: the result of a whole search; give one of the files channels-*.json beside "
            "it"
        )
    is_whole = isinstance(data, Mapping) and all((whole_number(n) or 0) > 0 for n in data.values())
    if not is_whole or not data:
        raise AnywidthError(
            f'{where}: expected the number of channels per group, such as {{"features.0": 32}}'
        )
    return ChannelConfig.from_json(data)
