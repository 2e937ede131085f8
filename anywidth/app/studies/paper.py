"""The paper's numbers: top-1 errors on ImageNet, in percent."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from anywidth.errors import AnywidthError

_FILE = Path(__file__).with_name("paper_tables.csv")


def paper_errors(table: str, network: str, setting: str) -> dict[float, float]:
    """Width → error of one line of the paper's tables."""
    found = _tables().get((table, network, setting))
    if found is None:
        raise AnywidthError(
            f"the paper's tables have no {setting!r} of {network!r} in {table!r}; they have "
            f"{sorted(_tables())}"
        )
    return dict(found)


@cache
def _tables() -> dict[tuple[str, str, str], dict[float, float]]:
    tables: dict[tuple[str, str, str], dict[float, float]] = {}
    with open(_FILE, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            line = tables.setdefault((row["table"], row["network"], row["setting"]), {})
            line[float(row["width"])] = float(row["top1_error"])
    return tables
