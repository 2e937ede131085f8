"""Searched channels against uniform widths and against pruning, trained and fine-tuned alike.

    python3 -m benchmarks.search RUN --work DIR [--out benchmarks/results/search.json]

RUN is a finished classification run, trained with --nonuniform and --held-out. For each share of
its multiply-adds, this measures the error on test images of

- the uniform width and the searched channels with RUN's shared weights, calibrated;
- both trained from scratch with RUN's recipe, once per seed;
- the searched channels cut from RUN and fine-tuned;
- the full network, trained alone with RUN's recipe, pruned by torch-pruning (magnitude and Taylor,
  global, in multiples of RUN's divisor) and fine-tuned for as many epochs, if the package
  torch-pruning is installed.

With --ranked 12, twelve random configurations are trained from scratch too, and the ranks of their
errors are compared with those of shared weights (Spearman). Every training is a run in DIR, so a
stopped benchmark can be continued; --parallel 4 trains four at once, and --minutes 9 stops before a
machine goes. A smoke test on a CPU: --epochs 1 --tuning-epochs 1 --seeds 1 --shares 0.5.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import anywidth as aw
from anywidth.app.interrupts import stopped_by_signals
from anywidth.app.runs.run import Run
from anywidth.app.studies.processes import terminated_at
from anywidth.app.tasks.channel_files import channels_to_text
from anywidth.app.tasks.classification.settings import ClassificationSettings
from anywidth.app.tasks.classification.task import TrainedClassifier, open_trained, train_run
from anywidth.training.statistics_state import statistics_to_tensors
from benchmarks.records import circumstances, write_record

METRIC = "top1_error"
PRUNING_STEPS = 400

Job = tuple[Path, ClassificationSettings]
"""A network to be trained: its folder and its settings."""


def train(folder: Path, settings: ClassificationSettings, deadline: float | None = None) -> bool:
    """Train a network unless it was before; false if a signal or the deadline stopped it."""
    if deadline is not None and time.time() >= deadline:
        return False
    run = Run.open(folder, writing=True) if folder.exists() else Run.create(folder, settings)
    try:
        with stopped_by_signals(), terminated_at(deadline):
            return run.finished or train_run(run, settings)
    except KeyboardInterrupt:
        return False


@dataclass(frozen=True)
class Bench:
    """The run, and where and how long networks of it are trained."""

    trained: TrainedClassifier
    work: Path
    epochs: int
    tuning_epochs: int
    tuning_rate: float
    parallel: int
    deadline: float | None

    def error(self, job: Job) -> float:
        """The test error of a network that was trained."""
        folder, settings = job
        opened = open_trained(folder, settings.device, settings=settings)
        with torch.no_grad():
            return opened.evaluate(opened.model.eval())[METRIC]

    def job(self, name: str, seed: int, **changes: Any) -> Job:
        return self.work / f"{name}-seed-{seed}", self.settings(seed, **changes)

    def settings(self, seed: int, **changes: Any) -> ClassificationSettings:
        """The run's recipe for one network alone."""
        alone = {"method": "i", "nonuniform": False, "lattice": None, "epochs": self.epochs}
        return dataclasses.replace(self.trained.settings, seed=seed, **{**alone, **changes})

    def scratch(self, name: str, channels: aw.ChannelConfig, seed: int) -> Job:
        return self.job(f"scratch-{name}", seed, own_channels=channels_to_text(channels))

    def train(self, jobs: list[Job]) -> None:
        """Train networks side by side; ends the program at the deadline, to be continued."""
        folders, settings = zip(*jobs, strict=True)
        with ProcessPoolExecutor(self.parallel, mp_context=get_context("spawn")) as pool:
            done = list(pool.map(train, folders, settings, [self.deadline] * len(jobs)))
        if not all(done):
            raise SystemExit("Stopped before the end; the same command continues.")

    def tuned(self, name: str, channels: aw.ChannelConfig, source: Path) -> Job:
        return self.job(
            f"tuned-{name}",
            0,
            own_channels=channels_to_text(channels),
            from_run=str(source.absolute()),
            epochs=self.tuning_epochs,
            learning_rate=self.tuning_rate,
        )

    def shared(self, channels: aw.ChannelConfig) -> float:
        """The test error with the run's own weights."""
        judging = self.trained.judging()
        assert judging.calibration is not None
        aw.calibrate(self.trained.model, judging.calibration, [channels])
        with torch.no_grad(), aw.at_width(self.trained.model.eval(), channels):
            return self.trained.evaluate(self.trained.model)[METRIC]


def searched(bench: Bench, shares: list[float]) -> dict[float, Any]:
    model, judging = bench.trained.model, bench.trained.judging()
    full = aw.macs(model, 1.0)
    result = aw.search(
        model,
        judging.evaluate,
        [aw.Budget("macs", share * full) for share in shares],
        calibration=judging.calibration,
        metric=judging.metric,
        notes=bench.work / "notes.json",
    )
    return dict(zip(shares, result.found, strict=True))


# ---- torch-pruning ------------------------------------------------------------------------------


def pruned(bench: Bench, full: Path, kind: str, most: float) -> tuple[Path, aw.ChannelConfig]:
    """A finished run of the full network, pruned to at most so many multiply-adds."""
    import torch_pruning

    source = open_trained(full, "cpu", settings=bench.settings(0))
    assert source.data is not None
    network = aw.extract(source.model, 1.0).train()
    importance = {
        "magnitude": torch_pruning.importance.GroupMagnitudeImportance(p=2),
        "taylor": torch_pruning.importance.GroupTaylorImportance(),
    }[kind]
    images, labels = next(iter(source.data.train.epoch(0)))
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    pruner = torch_pruning.pruner.BasePruner(
        network,
        images[:1],
        importance=importance,
        global_pruning=True,
        pruning_ratio=1.0,
        max_pruning_ratio=1 - source.settings.low,
        iterative_steps=PRUNING_STEPS,
        ignored_layers=[layers[-1]],
        round_to=source.settings.divisor,
    )
    plan = aw.plan_of(bench.trained.model)
    for _ in range(PRUNING_STEPS):
        network.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        pruner.step()
        channels = channels_of(network, plan)
        if plan.macs(channels) <= most:
            break
    else:
        raise SystemExit(f"torch-pruning did not reach {most:,.0f} multiply-adds")
    folder = bench.work / f"pruned-{kind}-{round(most)}"
    settings = bench.settings(0, own_channels=channels_to_text(channels))
    if not folder.exists():
        converted = aw.slimmable(network, None, aw.WidthRange(1.0, 1.0), example_input=images[:2])
        statistics_, metadata = statistics_to_tensors(converted)
        Run.create(folder, settings).save_final(
            {"model": converted.state_dict(), "statistics": statistics_},
            {**source.run.state()},
            metadata={"statistics": metadata},
        )
    return folder, channels


def channels_of(network: nn.Module, plan: aw.Plan) -> aw.ChannelConfig:
    """How many channels the layers of a pruned network make, group by group."""
    counts = {}
    for name, group in plan.groups.items():
        layer: Any = network.get_submodule(group.makers[0])
        counts[name] = layer.weight.shape[0]
    return aw.ChannelConfig.from_json(counts)


# ---- ranking ------------------------------------------------------------------------------------


def random_configurations(plan: aw.Plan, count: int) -> list[aw.ChannelConfig]:
    chance, names = random.Random(0), [group.name for group in plan.elastic()]
    low, high = plan.widths.low, plan.widths.high
    return [plan.resolve({name: chance.uniform(low, high) for name in names}) for _ in range(count)]


def ranking(shared: list[float], scratch: list[float]) -> dict[str, Any]:
    """The errors of configurations by shared weights and from scratch, and how alike they rank."""
    return {"shared": shared, "scratch": scratch, "spearman": spearman(shared, scratch)}


def spearman(ones: list[float], others: list[float]) -> float | None:
    """The correlation of the ranks; None if all values of a list are equal."""
    try:
        return statistics.correlation(ranks(ones), ranks(others))
    except statistics.StatisticsError:
        return None


def ranks(values: list[float]) -> list[float]:
    """Equal values share the mean of their places."""
    return [
        sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values
    ]


def _named(found: Any) -> dict[str, aw.ChannelConfig]:
    return {"uniform": found.uniform.channels, "searched": found.best.channels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of the trainings")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/search.json"))
    parser.add_argument("--shares", default="0.25,0.5", help="of the full multiply-adds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="from scratch; the run's if not given")
    parser.add_argument("--tuning-epochs", type=int, default=20)
    parser.add_argument("--tuning-rate", type=float, default=0.05)
    parser.add_argument("--ranked", type=int, default=0, help="configurations to rank")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parallel", type=int, default=1, help="trainings at once")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    trained = open_trained(given.run, given.device)
    epochs = given.epochs or trained.settings.epochs
    deadline = None if given.minutes is None else time.time() + 60 * given.minutes
    tuning = given.tuning_epochs, given.tuning_rate
    bench = Bench(trained, given.work, epochs, *tuning, given.parallel, deadline)
    began = time.monotonic()
    found = searched(bench, [float(share) for share in given.shares.split(",")])
    print(f"Searched in {time.monotonic() - began:.0f} s")
    full = bench.job("scratch-full", 0)
    scratch = {
        (share, name): [
            bench.scratch(f"{name}-{share}", channels, seed) for seed in range(given.seeds)
        ]
        for share, one in found.items()
        for name, channels in _named(one).items()
    }
    configurations = random_configurations(aw.plan_of(trained.model), given.ranked)
    ranked = [bench.scratch(f"ranked-{i}", one, 0) for i, one in enumerate(configurations)]
    bench.train([full, *(job for jobs in scratch.values() for job in jobs), *ranked])
    tuned = {
        (share, "searched"): bench.tuned(f"searched-{share}", one.best.channels, given.run)
        for share, one in found.items()
    }
    if importlib.util.find_spec("torch_pruning") is not None:
        for share, one in found.items():
            for kind in ("magnitude", "taylor"):
                folder, channels = pruned(bench, full[0], kind, one.budget.amount)
                tuned[share, kind] = bench.tuned(f"{kind}-{share}", channels, folder)
    bench.train(list(tuned.values()))
    errors: dict[str, Any] = {"full": bench.error(full)}
    for share, one in found.items():
        row: dict[str, Any] = {"macs": one.budget.amount, "is_uniform": one.is_uniform}
        for name, channels in _named(one).items():
            row[f"{name} shared"] = bench.shared(channels)
            row[f"{name} scratch"] = [bench.error(job) for job in scratch[share, name]]
        row |= {
            f"{kind} tuned": bench.error(job) for (of, kind), job in tuned.items() if of == share
        }
        errors[str(share)] = row
        print(share, row)
    if configurations:
        shared = [bench.shared(one) for one in configurations]
        errors["ranking"] = ranking(shared, [bench.error(job) for job in ranked])
    about = {"epochs": epochs, "tuning_epochs": given.tuning_epochs, "seeds": given.seeds}
    device = next(trained.model.parameters()).device
    write_record(given.out, {**circumstances(device), **about, "top1_error": errors})
    print(f"Written: {given.out}")


if __name__ == "__main__":
    main()
