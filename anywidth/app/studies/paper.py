"""The paper's numbers: top-1 errors on ImageNet, in percent."""

from __future__ import annotations

import csv
from pathlib import Path

from anywidth.errors import AnywidthError


def paper_errors(table: str, network: str, setting: str) -> dict[float, float]:
    """Width → error of one line of the paper's tables."""
    tables: dict[tuple[str, ...], dict[float, float]] = {}
    text = Path(__file__).with_name("paper_tables.csv").read_text(encoding="utf-8")
    for *line, width, error in csv.reader(text.splitlines()[1:]):
        tables.setdefault(tuple(line), {})[float(width)] = float(error)
    if (table, network, setting) not in tables:
        raise AnywidthError(
            f"the paper's tables have no {setting!r} of {network!r} in {table!r}; they have "
            f"{sorted(tables)}"
        )
    return tables[table, network, setting]
