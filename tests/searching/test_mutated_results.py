"""Results of a search and latency tables that anyone may have changed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutations import mutated, refusal
from tiny_networks import converted

import anywidth as aw
from anywidth.searching.budgets import Budget
from anywidth.searching.found import Found, Judged
from anywidth.searching.latency_fit import layer_terms
from anywidth.searching.latency_table import latency_devices
from anywidth.searching.probes import network_key


def changes(data: Any) -> Iterator[tuple[str, Any]]:
    yield from mutated(json.loads(json.dumps(data)), random.Random(0), 300)


def test_a_changed_result_is_refused_or_a_result() -> None:
    config = aw.plan_of(converted()).resolve(0.5)
    one = Judged(config, 10.0, {"error": 1.0})
    found = (Found(Budget("macs", 20.0), one, one),)
    whole = aw.SearchResult("error", "macs", found, (one,), (one,), 5)
    refused = 0
    for what, changed in changes(whole.to_json()):
        reason, again = refusal(aw.SearchResult.from_json, changed)
        refused += reason is not None
        assert again is None or isinstance(again.passes, int), what
    assert refused > 150


def test_a_changed_latency_table_is_refused_or_predicts(tmp_path: Path) -> None:
    model = converted()
    plan, path = aw.plan_of(model), tmp_path / "table.json"
    layers = dict.fromkeys(layer_terms(plan, plan.full, 4), (1.0, 1.0, 0.0, 0.0))
    device, key = latency_devices(model)[0], network_key(plan)
    aw.LatencyTable(device, key, 0.1, 4, layers, 0.1, plan).save(path)
    for what, changed in changes(json.loads(path.read_text())):
        path.write_text(json.dumps(changed))
        reason, table = refusal(aw.LatencyTable.load, path, model)
        if table is None:
            assert str(path) in str(reason), what
        else:
            assert table.predict(plan.full) > 0, what
