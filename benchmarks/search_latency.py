"""Networks that a search by latency found, against the fastest uniform widths.

    anywidth search RUN --latency 0.1ms,0.15ms --out FOUND
    python3 -m benchmarks.search_latency RUN FOUND [--out benchmarks/results/search_latency.json]

All networks have RUN's shared weights and are calibrated. onnxruntime runs them on one thread. The
uniform widths are those that the latency table of the search calls fast: every wider one takes
longer. Some counts of channels suit the kernels and others do not, so most widths are slower.

The networks take turns, so that a busy machine slows all of them alike. A time is the mean over
rounds of the fastest pass of a short round, in milliseconds that the thread had a processor; its
standard error is over the rounds. The test images are used here for the first and only time. Errors
of two networks are compared image by image, which gives the standard error of their difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import anywidth as aw
from anywidth.app.tasks.classification.task import TrainedClassifier, open_trained
from anywidth.files import read_json
from anywidth.searching.finalists import fast_uniform
from anywidth.translating.called_network import described
from anywidth.translating.onnx_graphs import onnx_graphs
from benchmarks.records import circumstances, open_session, write_record

_ROUNDS, _PASSES = 40, 15


def timed(model: torch.nn.Module, configs: list[aw.ChannelConfig]) -> list[list[float]]:
    """Per network, the fastest pass of each round, in milliseconds of the thread."""
    deployment = described(model)
    graphs = onnx_graphs(model, configs, deployment)
    sessions = [open_session(graph.SerializeToString()) for graph in graphs]
    feeds = {deployment.input_names[0]: deployment.examples[0][:1].numpy()}
    for session in sessions:
        session.run(None, feeds)
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(_ROUNDS):
        fastest = [math.inf] * len(sessions)
        for _ in range(_PASSES):
            for place, session in enumerate(sessions):
                start = time.thread_time()
                session.run(None, feeds)
                fastest[place] = min(fastest[place], 1000 * (time.thread_time() - start))
        for found, one in zip(times, fastest, strict=True):
            found.append(one)
    return times


def wrong(trained: TrainedClassifier, config: aw.ChannelConfig) -> torch.Tensor:
    """Which test images a network takes for another class."""
    assert trained.data is not None
    with torch.no_grad(), aw.at_width(trained.model, config):
        return torch.cat([trained.model(x).argmax(1) != y for x, y in trained.data.validation])


def standard_error(values: torch.Tensor) -> float:
    return 100 * float(values.double().std()) / math.sqrt(len(values))


def compared(rows: list[dict[str, Any]], one: dict[str, Any]) -> dict[str, Any]:
    """A found network against the uniform ones that are next to it in time and in error."""
    uniform = [row for row in rows if row["kind"] == "uniform"]
    slower = [row for row in uniform if row["ms"] >= one["ms"]]
    faster = [row for row in uniform if row["ms"] < one["ms"]]
    as_good = [row for row in uniform if row["error"] <= one["error"]]
    beside = {
        "next_slower": min(slower, key=lambda row: row["ms"], default=None),
        "best_faster": min(faster, key=lambda row: row["error"], default=None),
        "fastest_as_good": min(as_good, key=lambda row: row["ms"], default=None),
    }
    return {
        "budget": one["name"],
        **{name: against(one, row) for name, row in beside.items() if row is not None},
    }


def against(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    less = other["wrong"].double() - one["wrong"].double()
    return {
        "width": other["name"],
        "time_ratio": ratio(one, other),
        "points_less_error": round(100 * float(less.mean()), 3),
        "standard_error": round(standard_error(less), 3),
    }


def ratio(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """The median over rounds of one time over another, and the middle half of them."""
    ratios = [a / b for a, b in zip(one["times"], other["times"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [round(middle, 4), round(low, 4), round(high, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("found", type=Path, help="the folder of a search by latency")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/search_latency.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    trained = open_trained(given.run, "cpu")
    plan = aw.plan_of(trained.model)
    table = aw.LatencyTable.load(given.found / "latencies.json", trained.model)
    data = read_json(given.found / "search.json")
    result = aw.SearchResult.from_json(data)
    rows: list[dict[str, Any]] = [
        {"kind": "found", "name": str(one.budget),
         "channels": one.best.channels}
        for one in result.found if not one.is_uniform
    ]  # fmt: skip
    for config in fast_uniform(plan, table.predict):
        name = f"width {plan.fraction(config):.3f}"
        rows.append({"kind": "uniform", "name": name, "channels": config})
    configs = [row["channels"] for row in rows]
    calibration = trained.judging().calibration
    assert calibration is not None
    aw.calibrate(trained.model, calibration, configs)
    for row, times in zip(rows, timed(trained.model, configs), strict=True):
        row["times"], row["ms"] = times, statistics.fmean(times)
        row["wrong"] = wrong(trained, row["channels"])
        row["error"] = 100 * float(row["wrong"].double().mean())
    predicted = [table.predict(config) for config in configs]
    slope, start = statistics.linear_regression([row["ms"] for row in rows], predicted)
    off = [
        abs((start + slope * row["ms"]) / guess - 1)
        for row, guess in zip(rows, predicted, strict=True)
    ]
    comparisons = [compared(rows, row) for row in rows if row["kind"] == "found"]
    networks = [
        {
            "kind": row["kind"],
            "name": row["name"],
            "ms": round(row["ms"], 5),
            "ms_standard_error": round(statistics.stdev(row["times"]) / math.sqrt(_ROUNDS), 5),
            "macs": plan.macs(row["channels"]),
            "top1_error": round(row["error"], 3),
            "standard_error": round(standard_error(row["wrong"]), 3),
            "channels": row["channels"].to_json(),
        }
        for row in rows
    ]
    write_record(
        given.out,
        {
            **circumstances("cpu", "onnxruntime"),
            "device": table.device,
            "settings": {
                name: getattr(trained.settings, name)
                for name in ("model", "data", "epochs", "nonuniform", "held_out", "seed")
            },
            "judged_on": data["about"]["judged_on"],
            "passes": result.passes,
            "test_images": len(rows[0]["wrong"]),
            "table": {"block": table.block, "error_left_out": table.error,
                      "median_error_here": statistics.median(off), "largest_error_here": max(off)},
            "networks": networks,
            "comparisons": comparisons,
        },
    )  # fmt: skip
    for row in sorted(networks, key=lambda row: row["ms"]):
        print(f"{row['kind']:8} {row['name']:12} {row['ms']:.4f} ± {row['ms_standard_error']:.4f} "
              f"ms  {row['top1_error']:.2f} ± {row['standard_error']:.2f} %")  # fmt: skip
    print(json.dumps(comparisons, indent=1))
    print(f"Written: {given.out}")


if __name__ == "__main__":
    main()
