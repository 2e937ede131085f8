"""PPO from top to bottom: advantages, losses, losses of narrower widths, and batches of roll-outs.

Proximal policy optimisation (Schulman et al., 2017) trains the widest width, which plays. Narrower
widths learn from its games in one of three ways.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.app.tasks.reinforcement.environments import make_environment
from anywidth.app.tasks.reinforcement.rollout import Collector, Rollout
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.app.tasks.task_settings import arithmetic_of
from anywidth.errors import AnywidthError
from anywidth.training.distillation import Distill
from anywidth.training.seeds import derive_seed

Targets = dict[str, Tensor]
"""A batch: actions, log_probabilities, values, returns, advantages, and the clip."""

Output = tuple[Tensor, Tensor]
"""The network's output: logits and values."""


# ---- advantages and losses -----------------------------------------------------------------------


def advantages(
    rewards: Tensor, values: Tensor, ends: Tensor, discount: float, smoothing: float
) -> Tensor:
    """How much better each action was than expected: generalised advantage estimation.

    Rows are steps; `values` has one row more. Nothing is carried over the end of an episode.
    """
    found = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[0])
    for step in reversed(range(len(rewards))):
        goes_on = 1 - ends[step]
        surprise = rewards[step] + discount * goes_on * values[step + 1] - values[step]
        later = surprise + discount * smoothing * goes_on * later
        found[step] = later
    return found


def policy_loss(
    log_probabilities: Tensor,
    before: Tensor,
    advantages: Tensor,
    clip: Tensor,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate: changing a probability by more than `clip` gains nothing.

    If another policy played, the ratio can be large; `dual_clip` limits the cost of a bad action.
    """
    ratio = (log_probabilities - before).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain.mean()


def value_loss(
    values: Tensor, returns: Tensor, before: Tensor | None = None, clip: Tensor | None = None
) -> Tensor:
    """Half the squared error; with `before`, changing a value by more than `clip` gains nothing."""
    error = (values - returns).square()
    if before is not None and clip is not None:
        near = before + (values - before).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error.mean()


def entropy(logits: Tensor) -> Tensor:
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1).mean()


def ppo_loss(
    settings: ReinforcementSettings, output: Output, targets: Targets, *, played: bool = True
) -> Tensor:
    """PPO's loss of a batch; `played`: whether this width played the games."""
    logits, values = output[0].float(), output[1].float()
    chosen = logits.log_softmax(-1).gather(-1, targets["actions"][:, None])[:, 0]
    policy = policy_loss(
        chosen,
        targets["log_probabilities"],
        targets["advantages"],
        targets["clip"],
        None if played else settings.dual_clip,
    )
    before = targets["values"] if settings.clip_values and played else None
    value = value_loss(values, targets["returns"], before, targets["clip"])
    return policy + settings.value_weight * value - settings.entropy_weight * entropy(logits)


def divergence(output: Output, widest: Output) -> Tensor:
    """The distance of a policy from the widest: KL(widest || policy), mean over the batch."""
    return F.kl_div(
        output[0].float().log_softmax(-1),
        widest[0].float().log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )


def follow_widest(settings: ReinforcementSettings, output: Output, widest: Output) -> Tensor:
    """The loss of a narrower width that learns the policy and value of the widest.

    Fewer units need larger weights for the same policy, and because weights are shared, the logits
    of the widest grow too. Without the entropy, policies become certain too early at all widths.
    """
    value = value_loss(output[1].float(), widest[1].float())
    loss = divergence(output, widest) + settings.value_weight * value
    return settings.distill_weight * loss - settings.entropy_weight * entropy(output[0].float())


def learn_from_its_games(
    settings: ReinforcementSettings, output: Output, widest: Output, *, targets: Targets
) -> Tensor:
    """The loss of a narrower width that learns from the widest one's games by PPO."""
    return settings.distill_weight * ppo_loss(settings, output, targets, played=False)


def distillation_of(settings: ReinforcementSettings) -> Distill | None:
    if settings.method == "i" or settings.distill == "none":
        return None
    if settings.distill == "ppo":
        return partial(learn_from_its_games, settings)
    return partial(follow_widest, settings)


# ---- batches of roll-outs ------------------------------------------------------------------------


class RolloutLoader:
    """PPO's training data: an epoch is a roll-out of the current policy, used several times.

    A run that is resumed in the middle of an epoch plays the roll-out again, because the
    environments of a killed run are gone.
    """

    def __init__(
        self, settings: ReinforcementSettings, model: nn.Module, device: torch.device
    ) -> None:
        samples = settings.environments * settings.rollout
        if samples % settings.batch_size or settings.batch_size == 1:
            raise AnywidthError(
                f"{settings.given('batch_size')}: expected a divisor above 1 of the {samples} "
                f"observations from {settings.environments} games and {settings.rollout} steps"
            )
        self.settings = settings
        self.model = model
        self.device = device
        self.batch_size = settings.batch_size
        self.samples = samples
        self.per_pass = samples // settings.batch_size
        self.rollouts = math.ceil(settings.steps / samples)
        self.agent_steps = 0
        self.playing_seconds = 0.0
        self._collector: Collector | None = None

    def __len__(self) -> int:
        """Number of updates per roll-out."""
        return self.settings.epochs * self.per_pass

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Targets]]:
        settings = self.settings
        if self._collector is None:
            self._collector = self._begin(epoch)
        started = time.monotonic()
        rollout = self._collector.collect()
        self.playing_seconds += time.monotonic() - started
        values = rollout.values.cpu()
        gains = advantages(
            self._rewards(rollout), values, rollout.ends, settings.discount, settings.smoothing
        )
        share = 1 - epoch / self.rollouts if settings.anneal_clip else 1.0
        clip = torch.tensor(settings.clip * share, device=self.device)
        whole = {
            "actions": rollout.actions[:-1],
            "log_probabilities": rollout.log_probabilities[:-1],
            "values": rollout.values[:-1],
            "returns": (gains + values[:-1]).to(self.device),
            "advantages": gains.to(self.device),
        }
        whole = {name: tensor.flatten() for name, tensor in whole.items()}
        observations = rollout.observations[:-1].flatten(0, 1)
        self.agent_steps = (epoch + 1) * self.samples
        for update in range(start, len(self)):
            part = self._part(epoch, update)
            targets = {name: tensor[part] for name, tensor in whole.items()}
            targets["advantages"] = normalised(targets["advantages"])
            targets["clip"] = clip
            yield observations[part], targets

    def take_scores(self) -> list[float]:
        return [] if self._collector is None else self._collector.take_scores()

    def close(self) -> None:
        if self._collector is not None:
            self._collector.close()

    def _rewards(self, rollout: Rollout) -> Tensor:
        return rollout.rewards[:-1].sign() if self.settings.clip_rewards else rollout.rewards[:-1]

    def _begin(self, epoch: int) -> Collector:
        """Environments with new seeds for each start: a resumed run does not repeat games."""
        settings = self.settings
        name = settings.environment
        is_atari = name.startswith("atari:") or name.endswith("NoFrameskip-v4")
        parts = 2 if settings.overlap and is_atari and settings.environments % 2 == 0 else 1
        environments = [
            make_environment(
                name,
                settings.environments // parts,
                derive_seed("environment", settings.seed, epoch, part) % 2**31,
                threads=settings.threads,
            )
            for part in range(parts)
        ]
        precision = arithmetic_of(settings.precision, self.device)
        autocast = torch.bfloat16 if precision == "bfloat16" else None
        return Collector(self.model, environments, settings.rollout, self.device, autocast)

    def _part(self, epoch: int, update: int) -> Tensor:
        """The observations of an update: each pass uses all of them in a new order."""
        pass_number, position = divmod(update, self.per_pass)
        generator = torch.Generator()
        generator.manual_seed(derive_seed("order", self.settings.seed, epoch, pass_number))
        order = torch.randperm(self.per_pass * self.batch_size, generator=generator)
        return order[position * self.batch_size :][: self.batch_size].to(self.device)


def normalised(values: Tensor) -> Tensor:
    return (values - values.mean()) / (values.std() + 1e-8)


def learning_rate(settings: ReinforcementSettings, update: int, total: int) -> float:
    """With warm-up: Adam's first steps have full size for any gradient, and could kill units."""
    rise = min(1.0, (update + 1) / (settings.warmup_updates + 1))
    return settings.learning_rate * rise * (1 - update / total if settings.anneal else 1.0)
