"""How good a configuration is: quickly by batch statistics, or exactly after calibration."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from anywidth.distributed import gathered, rank, world_size
from anywidth.errors import AnywidthError, errors_about
from anywidth.files import read_json, write_json
from anywidth.json_values import any_number, mapped
from anywidth.measuring.spectra import numbers_by_name, undescribed
from anywidth.planning.modes import evaluating
from anywidth.slimming.convert import at_width
from anywidth.slimming.norm_statistics import batch_statistics, norm_records
from anywidth.slimming.state import state_of
from anywidth.training.calibration import calibrate
from anywidth.width import ChannelConfig

Evaluate = Callable[[nn.Module], Mapping[str, float]]
Kind = Literal["batch", "exact"]
"""The statistics that norms use."""
_SECONDS_BETWEEN_WRITES = 5.0
_KNOWN = mapped(mapped(any_number))


@dataclass
class Judge:
    """Evaluates configurations of one network and remembers the answers, also in a file.

    A search asks the same questions in the same order. So if it was killed, it gets the answers
    from the file and continues where it was. The few exact answers are found again, because they
    also depend on the calibration data.

    Ranks share the work and all get the same answers. Each must ask the same questions in the same
    order. An interrupt of one rank raises KeyboardInterrupt in all of them at the same question.
    """

    model: nn.Module
    evaluate: Evaluate
    calibration: Iterable[Any] | None
    wanted: str | None  # the metric, if one was asked for
    notes: Path | None
    is_stopped: Callable[[], bool] = lambda: False
    passes: int = 0

    def __post_init__(self) -> None:
        self._known: dict[str, dict[str, float]] = {}
        self._written = -math.inf
        self._network = network_fingerprint(self.model) if self.notes is not None else ""
        if self.notes is not None and self.notes.exists():
            self._read(self.notes)

    def score(self, config: ChannelConfig, kind: Kind = "batch") -> float:
        """The main metric; lower is better."""
        value = self.metrics(config, kind)[self.metric]
        if math.isnan(value):
            return math.inf
        return value if undescribed(self.metric).lower_is_better else -value

    def metrics(self, config: ChannelConfig, kind: Kind = "batch") -> dict[str, float]:
        """All metrics, as `evaluate` gives them."""
        self.judge_all([config], kind)
        return self._known[_key(kind, config)]

    def judge_all(self, configs: Sequence[ChannelConfig], kind: Kind = "batch") -> None:
        """Judges the configurations that are not known yet; ranks share them out."""
        new = [one for one in dict.fromkeys(configs) if _key(kind, one) not in self._known]
        if world_size() == 1:
            for config in new:
                self._note({_key(kind, config): self._measured(kind, config)})
        elif new:
            mine = {_key(kind, c): self._measured(kind, c) for c in new[rank() :: world_size()]}
            answers = gathered((mine, self.is_stopped()))
            self._note({key: found for known, _ in answers for key, found in known.items()})
            if any(is_stopped for _, is_stopped in answers):
                raise KeyboardInterrupt

    def shown(self, config: ChannelConfig) -> dict[str, float]:
        """The main metric by its name."""
        return {self.metric: self.metrics(config)[self.metric]}

    def prepare(self, config: ChannelConfig) -> None:
        """Calibrates a configuration, so that it can be used after the search."""
        if self.calibration is not None and norm_records(self.model):
            calibrate(self.model, self.calibration, [config])

    def _note(self, answers: Mapping[str, dict[str, float]]) -> None:
        self._known.update(answers)
        self.passes += len(answers)
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self.close()

    def _measured(self, kind: Kind, config: ChannelConfig) -> dict[str, float]:
        by_batch = kind == "batch" or self.calibration is None
        if not by_batch:
            self.prepare(config)
        statistics = batch_statistics(self.model) if by_batch else contextlib.nullcontext()
        with evaluating(self.model), torch.no_grad(), at_width(self.model, config), statistics:
            return numbers_by_name(self.evaluate(self.model))

    @property
    def metric(self) -> str:
        """The metric that decides: the one asked for, or the first that `evaluate` returns."""
        metrics = self.metrics(state_of(self.model).plan.widest)
        name = self.wanted or next(iter(metrics), None)
        if name is None or name not in metrics:
            raise AnywidthError(
                f"search(metric={self.wanted!r}): evaluate(model) returned {list(metrics)}; name "
                "one of these"
            )
        if not math.isfinite(metrics[name]):
            raise AnywidthError(
                f"evaluate(model) returned {name} = {metrics[name]} for the widest network, so "
                "nothing can be compared: look at the images it judges by and at the weights"
            )
        return name

    # ---- the file ---------------------------------------------------------------------------

    def close(self) -> None:
        """Writes all answers to the file, if there is one."""
        self._written = time.monotonic()
        if self.notes is not None and rank() == 0:
            known = {key: found for key, found in self._known.items() if key.startswith("batch")}
            write_json(self.notes, {"network": self._network, "known": known})

    def _read(self, notes: Path) -> None:
        data = read_json(notes)
        if data.get("network") != self._network:
            raise AnywidthError(
                f"{notes}: these are notes of a search on other weights; remove the file to start "
                "a new search"
            )
        with errors_about(f"{notes}: damaged notes of a search", "remove the file to start again"):
            known = _KNOWN(data.get("known"), "known")
        self._known = {key: found for key, found in known.items() if key.startswith("batch")}
        self._check_same_judge(notes)

    def _check_same_judge(self, notes: Path) -> None:
        """Judges the widest network again: other images would not give the same numbers."""
        widest = state_of(self.model).plan.widest
        before = self._known.get(_key("batch", widest))
        if before is None:
            return
        now = self._measured("batch", widest)
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.model.parameters())
        far = 1e-4 if on_cpu else 2e-2  # a GPU's sums vary from run to run
        is_same = now.keys() == before.keys() and all(
            math.isclose(now[name], value, rel_tol=far, abs_tol=1e-6)
            or (math.isnan(now[name]) and math.isnan(value))
            for name, value in before.items()
        )
        if not is_same:
            raise AnywidthError(
                f"{notes}: these are notes of a search that judged by other data: the widest "
                f"network had {before} then and has {now} now; remove the file to start a "
                "new search"
            )


def _key(kind: Kind, config: ChannelConfig) -> str:
    return f"{kind} {json.dumps(config.to_json(), sort_keys=True)}"


def network_fingerprint(model: nn.Module) -> str:
    """Tells the weights of a network from others."""
    digest = hashlib.sha256(json.dumps(state_of(model).plan.full.to_json()).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype}".encode())
        values = parameter.detach().cpu().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()[:32]
