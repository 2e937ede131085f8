"""Deep reinforcement learning: PPO at all widths at once, and individually trained policies.

The widest width plays and learns by proximal policy optimisation (PPO: Schulman et al., 2017). The
narrower ones learn on what it saw: by default its own policy and value at every observation
(inplace distillation). The network has no batch norm, so any width can play as soon as training
has ended.
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

from anywidth.app.runs.loop import Training, load_weights, save_final, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.examples import Example
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
from anywidth.app.tasks.task_settings import arithmetic_of
from anywidth.app.tasks.trained import Trained
from anywidth.deploying.deployment import Deployment
from anywidth.distributed import local_device, rank, world_size
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Metric
from anywidth.seeds import derive_seed
from anywidth.slimming.convert import at_width
from anywidth.training.precision import tf32_arithmetic
from anywidth.training.step import SandwichStep, StepResult

# ---- training ------------------------------------------------------------------------------------


def train_run(run: Run, settings: ReinforcementSettings) -> bool:
    """Trains until the last step, or an interrupt (then false); resumes where the run left off."""
    if world_size() > 1:
        raise AnywidthError("reinforcement learning runs in one process: start it without torchrun")
    device = local_device(settings.device)
    actions, shape = actions_and_shape(settings.environment)
    model = build_model(settings, actions, shape).to(device)
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
        autocast=torch.bfloat16 if precision == "bfloat16" else None,
        after_backward=partial(_clip_gradients, model, settings.gradient_clip),
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
    state = {
        "updates": step.count,
        "agent_steps": loader.rollouts * loader.samples,
        "actions": actions,
        "observation_shape": list(shape),
    }
    save_final(run, model, state)
    return True


def _clip_gradients(model: nn.Module, most: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), most)


class Measures:
    """What is logged of an update: how PPO goes, how far the narrowest is, games and pace."""

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
        # Agent steps outgrow the whole numbers that float32 can hold.
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
        """The true scores of the games that the widest width ended since the row before."""
        scores = self.loader.take_scores()
        return {"training_score": sum(scores) / len(scores)} if scores else {}


def curve_widths(settings: ReinforcementSettings) -> list[float]:
    """The widths of the learning curves: both ends and two between, as in the paper's figure."""
    if settings.method == "i":
        return [settings.width]
    return [round(settings.low + i * (settings.high - settings.low) / 3, 6) for i in range(4)]


def validate(
    model: nn.Module, settings: ReinforcementSettings, loader: RolloutLoader
) -> dict[str, float]:
    """Mean scores of a few games at each width of the curves; other games at every point."""
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
    """Full games at the width the network is set to."""
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
    """A finished run: its network as trained."""

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
        """Mean scores of full games, actions sampled and greedy; the same games at every width."""
        seed = derive_seed("evaluation", self.settings.seed)
        found: dict[str, float] = {}
        for name, greedy in (("score", False), ("greedy_score", True)):
            games = play(model, self.settings, self.settings.evaluation_games, seed, greedy=greedy)
            found |= {name: games.mean, f"{name}_standard_error": games.standard_error}
        return found

    def deployment(self) -> Deployment:
        return deployed_policy(self)

    def examples(self) -> list[Example]:
        return policy_examples(self)


def open_trained(
    folder: str | Path,
    device: str = "auto",
    with_data: bool = True,
    settings: ReinforcementSettings | None = None,
) -> TrainedPolicy:
    """Loads a finished run for evaluating or playing; its data are games, made when asked for."""
    run = Run.open_finished(folder, writing=rank() == 0)
    settings = settings or run.read_settings(ReinforcementSettings)
    state = run.state()
    model = build_model(settings, state["actions"], tuple(state["observation_shape"]))
    load_weights(model, run.model_tensors(), run.folder)
    model.to(local_device(device)).eval()
    return TrainedPolicy(run, settings, model)


TASK = Task(ReinforcementSettings, TrainedPolicy, train_run, open_trained, RECIPES, play_command)
