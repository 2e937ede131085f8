"""Deep reinforcement learning: PPO at all widths at once, and individually trained policies.

The widest width plays and learns by proximal policy optimisation (PPO: Schulman et al., 2017).
Narrower widths learn from its games: by default its policy and value at every observation (inplace
distillation). The network has no batch norm, so after training any width can play.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from anywidth.app.runs.loop import Training, load_final, save_final, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.reinforcement.command import play as play_command
from anywidth.app.tasks.reinforcement.deployment import deployed_policy, policy_examples
from anywidth.app.tasks.reinforcement.playing import GameScores, play_games
from anywidth.app.tasks.reinforcement.policies import actions_and_shape, build_model
from anywidth.app.tasks.reinforcement.ppo import (
    RolloutLoader,
    Targets,
    distillation_of,
    divergence,
    entropy,
    learning_rate,
    policy_loss,
    ppo_loss,
    value_loss,
)
from anywidth.app.tasks.reinforcement.recipes import RECIPES
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.starting_network import start_with_weights
from anywidth.app.tasks.task_settings import arithmetic_of, read_settings
from anywidth.app.tasks.trained import Judging, Trained
from anywidth.distributed import local_device, rank, world_size
from anywidth.errors import AnywidthError
from anywidth.json_values import listed, whole
from anywidth.measuring.spectra import Metric
from anywidth.slimming.convert import at_width
from anywidth.training.precision import tf32_arithmetic
from anywidth.training.seeds import derive_seed
from anywidth.training.step import SandwichStep, StepResult

# ---- training ------------------------------------------------------------------------------------


def train_run(run: Run, settings: ReinforcementSettings) -> bool:
    """Train or resume a run until its last step; false if it was interrupted."""
    if world_size() > 1:
        raise AnywidthError("reinforcement learning runs in one process: start it without torchrun")
    device = local_device(settings.device)
    actions, shape = actions_and_shape(settings.environment)
    model = build_model(settings, actions, shape).to(device)
    start_with_weights(run, model, settings)
    precision = arithmetic_of(settings.precision, device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.learning_rate, eps=1e-5, fused=device.type == "cuda"
    )
    step = SandwichStep(
        model,
        optimizer,
        partial(ppo_loss, settings),
        distillation_of(settings),
        settings.sampling(),
        **settings.step_options(),
        autocast=torch.bfloat16 if precision == "bfloat16" else None,
        after_backward=partial(
            nn.utils.clip_grad_norm_, list(model.parameters()), settings.gradient_clip
        ),
    )
    loader = RolloutLoader(settings, model, device)
    total = loader.rollouts * len(loader)
    training = Training(
        run,
        step,
        loader,
        loader.rollouts,
        lambda update: learning_rate(settings, update, total),
        Measures(settings, loader),
        partial(validate, model, settings, loader),
        settings.validate_every,
        settings.log_every * len(loader),
        settings.checkpoint_every * len(loader),
        description=settings.name,
        counts_images=False,
    )
    with contextlib.closing(loader), tf32_arithmetic(precision != "float32"):
        if not train(training):
            return False
    if step.ema is not None:
        step.ema.copy_to(model)
    state = {
        "updates": step.count,
        "agent_steps": loader.rollouts * loader.samples,
        "actions": actions,
        "observation_shape": list(shape),
    }
    save_final(run, model, state)
    return True


class Measures:
    """The log of an update: PPO's losses, distance of the narrowest width, games and pace."""

    def __init__(self, settings: ReinforcementSettings, loader: RolloutLoader) -> None:
        self.settings = settings
        self.loader = loader
        self._before = (0.0, 0, 0.0)

    def __call__(self, result: StepResult, targets: Targets) -> dict[str, Tensor]:
        logits, values = (part.float() for part in result.outputs[0])
        chosen = logits.log_softmax(-1).gather(-1, targets["actions"][:, None])[:, 0]
        change = chosen - targets["log_probabilities"]
        found = {
            "policy_loss": policy_loss(
                chosen, targets["log_probabilities"], targets["advantages"], targets["clip"]
            ),
            "value_loss": value_loss(values, targets["returns"]),
            "entropy": entropy(logits),
            "policy_change": (change.exp() - 1 - change).mean(),
            "clipped_share": (change.exp() - 1).abs().gt(targets["clip"]).float().mean(),
            "explained_variance": 1
            - (targets["returns"] - values).var() / targets["returns"].var(),
        }
        if len(result.outputs) > 1:
            found[f"divergence/{self.settings.low}"] = divergence(*result.outputs[1::-1])
        # float32 cannot represent such large numbers of agent steps.
        numbers = {**self._pace(), **self._games()}
        return found | {n: torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()}

    def _pace(self) -> dict[str, float]:
        now = time.monotonic(), self.loader.agent_steps, self.loader.playing_seconds
        seconds, steps, playing = (a - b for a, b in zip(now, self._before, strict=True))
        is_first, self._before = self._before[1] == 0, now
        found = {"agent_steps": float(self.loader.agent_steps)}
        if not is_first:
            found |= {"agent_steps_per_second": steps / seconds, "playing_share": playing / seconds}
        return found

    def _games(self) -> dict[str, float]:
        """The true scores of the games that the widest width finished since the last row."""
        scores = self.loader.take_scores()
        return {"training_score": sum(scores) / len(scores)} if scores else {}


def curve_widths(settings: ReinforcementSettings) -> list[float]:
    """The widths of the learning curves: both ends and two in between, as in the paper."""
    if settings.method == "i":
        return [settings.width]
    step = (settings.high - settings.low) / 3
    return list(dict.fromkeys(round(settings.low + i * step, 6) for i in range(4)))


def validate(
    model: nn.Module, settings: ReinforcementSettings, loader: RolloutLoader
) -> dict[str, float]:
    """Mean scores of a few games at each width of the curves; each point plays other games."""
    seed = derive_seed("curve", settings.seed, loader.agent_steps)
    found = {"agent_steps": float(loader.agent_steps)}
    for width in curve_widths(settings):
        with at_width(model, settings.own_width(model, width)):
            games = play(model, settings, settings.curve_games, seed, greedy=False)
        found[f"score/{width}"] = games.mean
    return found


# ---- after training ------------------------------------------------------------------------------


def play(
    model: nn.Module, settings: ReinforcementSettings, games: int, seed: int, *, greedy: bool
) -> GameScores:
    """Play full games at the current width."""
    return play_games(
        model,
        settings.environment,
        games,
        seed,
        greedy=greedy,
        most_steps=settings.longest_game,
        threads=settings.threads,
    )


@dataclass(frozen=True)
class TrainedPolicy(Trained):
    """A finished run with its trained network."""

    settings: ReinforcementSettings

    metrics: ClassVar[Mapping[str, Metric]] = {
        "score": Metric("mean score", 2),
        "greedy_score": Metric("mean score, greedy", 2),
    }
    drawn: ClassVar[tuple[str, ...]] = ("score", "greedy_score")
    curves: ClassVar[Mapping[str, str]] = {
        "policy_loss": "policy loss",
        "value_loss": "value loss",
        "training_score": "training score",
        "score": "mean score",
    }

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean scores of full games, sampled and greedy; the same games at every width."""
        seed = derive_seed("evaluation", self.settings.seed)
        found: dict[str, float] = {}
        for name, greedy in (("score", False), ("greedy_score", True)):
            games = play(model, self.settings, self.settings.evaluation_games, seed, greedy=greedy)
            found |= {name: games.mean, f"{name}_standard_error": games.standard_error}
        return found

    @property
    def measured_on(self) -> str:
        return f"{self.settings.evaluation_games} games of {self.settings.environment}"

    def judging(self, seed: int = 0) -> Judging:
        """By the mean score of games that are played neither in training nor in `evaluate`."""
        settings = self.settings
        start = derive_seed("judging", settings.seed, seed)

        def score(model: nn.Module) -> dict[str, float]:
            games = play(model, settings, settings.evaluation_games, start, greedy=False)
            return {"score": games.mean, "score_standard_error": games.standard_error}

        games = f"{settings.evaluation_games:,} games, the same for every configuration"
        return Judging(score, "score", games, is_held_out=True)

    deployment = deployed_policy
    examples = policy_examples


_STATE = {"actions": whole(1, 2**16), "observation_shape": listed(whole(1, 2**14))}


def open_trained(
    folder: str | Path,
    device: str = "auto",
    with_data: bool = True,
    settings: ReinforcementSettings | None = None,
) -> TrainedPolicy:
    """Load a finished run to evaluate or play."""
    run = Run.open_finished(folder, writing=rank() == 0)
    settings = settings or read_settings(run, ReinforcementSettings)
    state = run.read_state(_STATE)
    model = build_model(settings, state["actions"], tuple(state["observation_shape"]))
    load_final(model, run)
    model.to(local_device(device)).eval()
    return TrainedPolicy(run, settings, model)


TASK = Task(ReinforcementSettings, TrainedPolicy, train_run, open_trained, RECIPES, play_command)
