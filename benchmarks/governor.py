"""How many requests each policy answers in time, and how accurately: real inference, real time.

    python3 -m benchmarks.governor --out benchmarks/results/governor.json
    python3 -m benchmarks.governor --quick

One CPU thread serves MobileNet v1 at 224 px. Requests are due after three times what the widest
width takes. They arrive in bursts (gamma, squared coefficient of variation 2, 4 and 8) at 1.1 times
what the widest width can answer, and as in two traces of Azure (`benchmarks/traces`), sped up.
Weights are random, as latency does not depend on them; accuracies are the published ones: of
US-MobileNet v1 for the bundle, of networks trained alone (I-Nets) for static files. Accuracy is
the mean over the requests that were answered in time. All policies see the same arrivals and drop
requests that they cannot answer in time. It takes about an hour; on a busy machine every policy
loses requests to interruptions.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from anywidth_runtime.governor import Governor, Policy
from anywidth_runtime.governor_menu import Choice, make_menu
from anywidth_runtime.governor_queue import DeadlineQueue, Waiting
from anywidth_runtime.governor_scheduler import QueueFull, Scheduler, TooLate
from anywidth_runtime.governor_scheduler import Served as Answer
from anywidth_runtime.short_pauses import shorten_pauses

from benchmarks import governor_networks as networks
from benchmarks.governor_rivals import FixedWidth, MostAccurateForHead, SlackFit
from benchmarks.records import circumstances, write_record

TRACES = Path(__file__).parent / "traces"
OBJECTIVE = 3.0
"""When answers are due, in times that the widest width takes."""
LOAD = 1.1
"""Requests per second, as a share of what the widest width can answer."""
CODE_LOAD = 0.6
"""The mean load of the `code` trace: its bursts are many times that."""
BATCHES = (1, 2, 4, 8, 16)


def gamma_arrivals(count: int, rate: float, squared_variation: float) -> np.ndarray:
    gaps = np.random.default_rng(0).gamma(1 / squared_variation, squared_variation / rate, count)
    return np.cumsum(gaps)


def trace_arrivals(name: str, rate: float) -> np.ndarray:
    """A trace sped up to a mean rate."""
    with (TRACES / f"azure_llm_2023_{name}.csv").open() as file:
        seconds = np.array([float(row["seconds"]) for row in csv.DictReader(file)])
    return seconds * (len(seconds) / rate / seconds[-1])


def loads(capacity: float, seconds: float, trace_seconds: float) -> dict[str, np.ndarray]:
    """Arrival times by name. Traces are cut, not thinned, so that their bursts stay."""
    count = round(seconds * LOAD * capacity)
    found = {f"gamma {cv}": gamma_arrivals(count, LOAD * capacity, cv) for cv in (2, 4, 8)}
    for name, load in (("code", CODE_LOAD), ("conv", LOAD)):
        arrivals = trace_arrivals(name, load * capacity)
        found[name] = arrivals[arrivals < trace_seconds]
    return found


def replay(
    arrivals: np.ndarray, served: networks.Served, policy: Policy, objective_ms: float
) -> dict[str, float]:
    """Send requests at their moments and wait for the last answer."""
    accuracies = {one.width: one.accuracy or 0.0 for one in served.choices}
    image = np.random.default_rng(0).random((1, 3, networks.PIXELS, networks.PIXELS), np.float32)
    futures: list[Future[Answer] | None] = []
    with Scheduler(served.run, policy, most_waiting=100_000) as scheduler:
        start = scheduler.clock()
        for moment in arrivals:
            due = start + moment
            while (left := due - scheduler.clock()) > 0:
                time.sleep(left)
            try:
                # As of the moment it was to come: a sender that is late gives nobody time.
                futures.append(scheduler.submit(image, deadline_ms=objective_ms, since=due))
            except QueueFull:
                futures.append(None)
    in_time, late, widths = [], 0, []
    for future in futures:
        error = None if future is None else future.exception()
        if future is None or isinstance(error, TooLate):
            continue
        if error is not None:
            raise error
        answer = future.result()
        late += not answer.is_in_time
        if answer.is_in_time:
            in_time.append(accuracies[answer.width])
            widths.append(float(answer.width))
    return {
        "requests": len(arrivals),
        "in_time": len(in_time) / len(arrivals),
        "answered_late": late / len(arrivals),
        "accuracy": float(np.mean(in_time)) if in_time else 0.0,
        "mean_width": float(np.mean(widths)) if widths else 0.0,
    }


def best_fixed(
    run: Callable[[Choice], dict[str, float]], menu: Sequence[Choice], in_time: float
) -> tuple[Choice, dict[str, float]]:
    """The widest fixed width that is in time as often, by bisection; else the narrowest."""
    low, high = 0, len(menu) - 1
    best, found = menu[0], run(menu[0])
    while low < high:
        middle = (low + high + 1) // 2
        tried = run(menu[middle])
        if tried["in_time"] >= in_time:
            low, best, found = middle, menu[middle], tried
        else:
            high = middle - 1
    return best, found


def decision_microseconds(choices: Sequence[Choice], waiting: int = 100) -> float:
    """The median time of one decision with so many requests queued."""
    governor, queue = Governor(choices), DeadlineQueue()
    for number in range(waiting):
        queue.push(Waiting(10 + 0.01 * number))
        governor.arrived(queue[-1], 9.98)
    governor.latencies.reserve = 0.003
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        governor.decide(queue, 9.99)
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times))


def policies(
    bundle: networks.Served,
    static: networks.Served,
    static_alone: networks.Served,
    times: dict[tuple[float | str, int], float],
) -> dict[str, tuple[networks.Served, Callable[[], Policy]]]:
    """What is compared; each is made afresh for each load, having learned nothing."""
    choices = bundle.choices
    accuracies = {one.width: one.accuracy or 0.0 for one in choices}
    widest = make_menu(choices)[-1]
    return {
        "governor": (bundle, lambda: Governor(choices)),
        "SlackFit": (bundle, lambda: SlackFit(times, accuracies, fills_batches=True)),
        "SlackFit, batch <= queue": (bundle, lambda: SlackFit(times, accuracies)),
        "most accurate for the head": (bundle, lambda: MostAccurateForHead(choices)),
        "static files, governor": (static, lambda: Governor(static.choices)),
        "static files, one open, governor": (static_alone, lambda: Governor(static.choices)),
        f"fixed {widest.width:g}": (bundle, lambda: FixedWidth(widest)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--seconds", type=float, default=60, help="of each gamma load")
    parser.add_argument("--trace-seconds", type=float, default=200, help="of each trace")
    parser.add_argument("--quick", action="store_true", help="a few seconds of each")
    parser.add_argument("--files", type=Path, help="keep the networks here; else they are rebuilt")
    parser.add_argument("--only", nargs="*", help="loads to replay")
    arguments = parser.parse_args()
    seconds, trace_seconds = arguments.seconds, arguments.trace_seconds
    repeats = 50
    if arguments.quick:
        seconds, trace_seconds, repeats = 4.0, 4.0, 5
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        bundle_file, files = networks.build(arguments.files or Path(temporary))
        bundle, network = networks.of_bundle(bundle_file, repeats)
        static = networks.of_static_files(files, repeats, kept_open=True)
        alone = networks.of_static_files(files, 1, kept_open=False)
        times = networks.batch_times(network, BATCHES, max(3, repeats // 5))
        menu = make_menu(bundle.choices)
        widest_ms = menu[-1].milliseconds
        shorten_pauses()  # as the server does
        record: dict[str, Any] = {
            **circumstances("cpu", "onnxruntime"),
            "objective_ms": OBJECTIVE * widest_ms,
            "decision_microseconds_with_100_queued": decision_microseconds(bundle.choices),
            "menu": {f"{one.width}": one.milliseconds for one in menu},
            "static_menu": {f"{one.width}": one.milliseconds for one in static.choices},
            "loads": {},
        }
        print(json.dumps({k: v for k, v in record.items() if k != "loads"}, indent=1), flush=True)
        for name, arrivals in loads(1000 / widest_ms, seconds, trace_seconds).items():
            if not arguments.only or name in arguments.only:
                record["loads"][name] = compare(name, arrivals, bundle, static, alone, times)
                write_record(arguments.out, record)


def compare(
    name: str,
    arrivals: np.ndarray,
    bundle: networks.Served,
    static: networks.Served,
    alone: networks.Served,
    times: dict[tuple[float | str, int], float],
) -> dict[str, dict[str, float]]:
    """All policies on one load, and the best fixed width."""
    menu = make_menu(bundle.choices)
    objective = OBJECTIVE * menu[-1].milliseconds
    found: dict[str, dict[str, float]] = {}

    def show(policy: str) -> None:
        one = found[policy]
        print(
            f"{name:10} {policy:34} in time {one['in_time']:.4f}, accuracy {one['accuracy']:.2f}, "
            f"mean width {one['mean_width']:.3f}",
            flush=True,
        )

    for policy, (served, make) in policies(bundle, static, alone, times).items():
        found[policy] = replay(arrivals, served, make(), objective)
        show(policy)
    in_time = found["governor"]["in_time"]
    fixed, outcome = best_fixed(
        lambda one: replay(arrivals, bundle, FixedWidth(one), objective), menu, in_time
    )
    found["best fixed width"] = {**outcome, "width": float(fixed.width)}
    show("best fixed width")
    return found


if __name__ == "__main__":
    main()
