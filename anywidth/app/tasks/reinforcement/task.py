"""Deep reinforcement learning: PPO at all widths at once, and individually trained policies.

The widest width plays and learns by proximal policy optimisation (PPO: Schulman et al., 2017).
Narrower widths learn from its games: by default its policy and value at every observation (inplace
distillation). The network has no batch norm, so after training any width can play.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial

import torch
from torch import Tensor, nn

from anywidth.app.runs.loop import Training, save_final, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.registry import Task
from anywidth.app.tasks.reinforcement import ppo
from anywidth.app.tasks.reinforcement.command import play as play_command
from anywidth.app.tasks.reinforcement.policies import actions_and_shape, build_model
from anywidth.app.tasks.reinforcement.recipes import RECIPES
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.reinforcement.trained import TrainedPolicy, play
from anywidth.app.tasks.starting_network import start_with_weights
from anywidth.app.tasks.task_settings import arithmetic_of
from anywidth.distributed import local_device, world_size
from anywidth.errors import AnywidthError
from anywidth.slimming.convert import at_width
from anywidth.training.precision import tf32_arithmetic
from anywidth.training.seeds import derive_seed
from anywidth.training.step import SandwichStep, StepResult


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
        partial(ppo.ppo_loss, settings),
        ppo.distillation_of(settings),
        settings.sampling(),
        **settings.step_options(),
        autocast=torch.bfloat16 if precision == "bfloat16" else None,
        after_backward=partial(
            nn.utils.clip_grad_norm_, list(model.parameters()), settings.gradient_clip
        ),
    )
    loader = ppo.RolloutLoader(settings, model, device)
    total = loader.rollouts * len(loader)
    training = Training(
        run,
        step,
        loader,
        loader.rollouts,
        lambda update: ppo.learning_rate(settings, update, total),
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

    def __init__(self, settings: ReinforcementSettings, loader: ppo.RolloutLoader) -> None:
        self.settings = settings
        self.loader = loader
        self._before = (0.0, 0, 0.0)

    def __call__(self, result: StepResult, targets: ppo.Targets) -> dict[str, Tensor]:
        logits, values = (part.float() for part in result.outputs[0])
        chosen = logits.log_softmax(-1).gather(-1, targets["actions"][:, None])[:, 0]
        change = chosen - targets["log_probabilities"]
        found = {
            "policy_loss": ppo.policy_loss(
                chosen, targets["log_probabilities"], targets["advantages"], targets["clip"]
            ),
            "value_loss": ppo.value_loss(values, targets["returns"]),
            "entropy": ppo.entropy(logits),
            "policy_change": (change.exp() - 1 - change).mean(),
            "clipped_share": (change.exp() - 1).abs().gt(targets["clip"]).float().mean(),
            "explained_variance": 1
            - (targets["returns"] - values).var() / targets["returns"].var(),
        }
        if len(result.outputs) > 1:
            found[f"divergence/{self.settings.low}"] = ppo.divergence(*result.outputs[1::-1])
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
    model: nn.Module, settings: ReinforcementSettings, loader: ppo.RolloutLoader
) -> dict[str, float]:
    """Mean scores of a few games at each width of the curves; each point plays other games."""
    seed = derive_seed("curve", settings.seed, loader.agent_steps)
    found = {"agent_steps": float(loader.agent_steps)}
    for width in curve_widths(settings):
        with at_width(model, settings.own_width(model, width)):
            games = play(model, settings, settings.curve_games, seed, greedy=False)
        found[f"score/{width}"] = games.mean
    return found


TASK = Task(ReinforcementSettings, TrainedPolicy, train_run, RECIPES, play_command)
open_trained = TASK.open
