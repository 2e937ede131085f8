"""PPO against hand calculations: advantages, ratios, clipping, and what a roll-out holds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.app.tasks.reinforcement.environments import Outcome, VectorEnvironment
from anywidth.app.tasks.reinforcement.ppo import (
    RolloutLoader,
    advantages,
    distillation_of,
    divergence,
    entropy,
    follow_widest,
    learning_rate,
    normalised,
    policy_loss,
    ppo_loss,
    value_loss,
)
from anywidth.app.tasks.reinforcement.rollout import Collector
from anywidth.app.tasks.reinforcement.settings import ReinforcementSettings
from anywidth.errors import AnywidthError
from anywidth.models.atari_cnn import mlp_policy
from anywidth.slimming.convert import at_width, slimmable
from anywidth.training.step import SandwichStep
from anywidth.width import WidthRange

SETTINGS = ReinforcementSettings(environment="gym:CartPole-v1", device="cpu")
CLIP = torch.tensor(0.2)
CPU = torch.device("cpu")


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


# ---- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        # Surprises 1.4, -0.82 and 2.16, each with 0.9 * 0.8 of the advantage after it.
        ((0, 0, 0), (1.4 + 0.72 * (-0.82 + 0.72 * 2.16), -0.82 + 0.72 * 2.16, 2.16)),
        # An end after the second step: its surprise is 0 - 1, and nothing comes from the third.
        ((0, 1, 0), (1.4 - 0.72, -1.0, 2.16)),
        ((0, 0, 1), (1.4 + 0.72 * (-0.82 + 0.72 * 1.8), -0.82 + 0.72 * 1.8, 1.8)),
    ],
)
def test_advantages_by_hand(ends: tuple[int, ...], expected: tuple[float, ...]) -> None:
    found = advantages(
        column(1.0, 0.0, 2.0),
        column(0.5, 1.0, 0.2, 0.4),
        column(*ends),
        discount=0.9,
        smoothing=0.8,
    )
    torch.testing.assert_close(found, column(*expected))


def test_without_smoothing_advantages_are_discounted_returns_less_values() -> None:
    rewards, values = torch.rand(6, 3), torch.rand(7, 3)
    found = advantages(rewards, values, torch.zeros(6, 3), discount=0.5, smoothing=1.0)
    for step in range(6):
        later = sum(0.5 ** (i - step) * rewards[i] for i in range(step, 6))
        expected = later + 0.5 ** (6 - step) * values[6] - values[step]
        torch.testing.assert_close(found[step], expected)


def test_normalised_advantages() -> None:
    found = normalised(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert found.mean().abs() < 1e-6
    assert found.std().item() == pytest.approx(1.0)


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "gain", "slope"),
    [
        (1.1, 2.0, None, 2.2, 2.0),  # inside the clip: the plain surrogate
        (1.5, 2.0, None, 2.4, 0.0),  # nothing more to gain from a likelier good action
        (0.5, 2.0, None, 1.0, 2.0),  # a good action that became unlikely is still pulled back
        (0.5, -2.0, None, -1.6, 0.0),  # nothing more to gain from an unlikelier bad action
        (1.5, -2.0, None, -3.0, -2.0),  # a bad action that became likely is still pushed away
        (5.0, -2.0, None, -10.0, -2.0),
        (5.0, -2.0, 3.0, -6.0, 0.0),  # unless it is so likely that another policy must have played
        (2.5, -2.0, 3.0, -5.0, -2.0),
        (5.0, 2.0, 3.0, 2.4, 0.0),
    ],
)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, dual_clip: float | None, gain: float, slope: float
) -> None:
    before = torch.tensor([-1.0])
    now = (before + math.log(ratio)).requires_grad_()
    loss = policy_loss(now, before, torch.tensor([advantage]), CLIP, dual_clip)
    assert loss.item() == pytest.approx(-gain, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, now)
    assert gradient.item() == pytest.approx(-slope * ratio, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (1.1, 0.5 * 0.9**2, -0.9),  # within 0.2 of the value before
        (1.6, 0.5 * 0.8**2, 0.0),  # nearer to the return than 1.2 allows: counts as 1.2
        (0.5, 0.5 * 1.5**2, -1.5),  # moved away from the return: pulled back in full
    ],
)
def test_value_loss_by_hand(value: float, loss: float, slope: float) -> None:
    now = torch.tensor([value], requires_grad=True)
    before, returns = torch.tensor([1.0]), torch.tensor([2.0])
    found = value_loss(now, returns, before, CLIP)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found, now)[0].item() == pytest.approx(slope)
    assert value_loss(now, returns).item() == pytest.approx(0.5 * (value - 2) ** 2)


def test_entropy_and_divergence_by_hand() -> None:
    assert entropy(torch.zeros(5, 4)).item() == pytest.approx(math.log(4))
    assert entropy(torch.tensor([[50.0, 0.0]])).item() == pytest.approx(0.0, abs=1e-6)
    wide, narrow = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    nothing = torch.zeros(1)
    assert divergence((narrow, nothing), (wide, nothing)).item() == pytest.approx(expected)
    assert divergence((wide, nothing), (wide, nothing)).item() == pytest.approx(0.0, abs=1e-7)


def batch() -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    logits = torch.randn(6, 3)
    actions = torch.randint(0, 3, (6,))
    taken = logits.log_softmax(-1).gather(-1, actions[:, None])[:, 0]
    targets = {
        "actions": actions,
        "log_probabilities": taken - torch.linspace(-0.5, 3.0, 6),
        "values": torch.randn(6),
        "returns": torch.randn(6),
        "advantages": -torch.rand(6),
        "clip": CLIP,
    }
    return (logits, torch.randn(6)), targets


def test_the_loss_is_the_sum_of_its_parts() -> None:
    (logits, values), targets = batch()
    taken = logits.log_softmax(-1).gather(-1, targets["actions"][:, None])[:, 0]
    surrogate = (taken, targets["log_probabilities"], targets["advantages"], CLIP)
    clipped = value_loss(values, targets["returns"], targets["values"], CLIP)
    settings = replace(SETTINGS, value_weight=0.7, entropy_weight=0.3, dual_clip=3.0)
    expected = policy_loss(*surrogate) + 0.7 * clipped - 0.3 * entropy(logits)
    torch.testing.assert_close(ppo_loss(settings, (logits, values), targets), expected)
    plain = value_loss(values, targets["returns"])
    expected = policy_loss(*surrogate, 3.0) + 0.7 * plain - 0.3 * entropy(logits)
    found = ppo_loss(settings, (logits, values), targets, played=False)
    torch.testing.assert_close(found, expected)
    assert policy_loss(*surrogate, 3.0) < policy_loss(*surrogate)


def test_what_narrower_widths_learn() -> None:
    output, targets = batch()
    widest, _ = batch()
    learned = divergence(output, widest) + 0.5 * value_loss(output[1], widest[1])
    expected = learned - 0.01 * entropy(output[0])
    torch.testing.assert_close(follow_widest(SETTINGS, output, widest), expected)
    alone = replace(SETTINGS, entropy_weight=0.0)
    assert follow_widest(alone, widest, widest).item() == pytest.approx(0.0, abs=1e-7)
    by_ppo = distillation_of(replace(SETTINGS, distill="ppo"))
    torch.testing.assert_close(
        by_ppo(output, widest, targets=targets),  # type: ignore[misc]
        ppo_loss(SETTINGS, output, targets, played=False),
    )
    assert distillation_of(replace(SETTINGS, distill="none")) is None
    assert distillation_of(replace(SETTINGS, method="i")) is None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distilling_brings_the_narrowest_close_to_the_widest(seed: int) -> None:
    """The widest is held where it is, so what the narrowest learns it has from the widest."""
    torch.manual_seed(seed)
    model = small_network(3.0, units=32)
    observations = torch.randn(64, 2)
    held = tuple(part.detach() for part in model(observations))
    step = SandwichStep(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda output, targets: sum(map(F.mse_loss, output, targets)),
        distillation_of(replace(SETTINGS, entropy_weight=0.0)),
        widths=2,
    )
    distances = []
    for _ in range(300):
        widest, narrowest = step(observations, held).outputs
        distances.append(
            (divergence(narrowest, widest).item(), value_loss(narrowest[1], widest[1]).item())
        )
    assert distances[-1][0] < 0.1 * distances[0][0]
    assert distances[-1][1] < 0.1 * distances[0][1]


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    settings = replace(SETTINGS, learning_rate=0.5)
    assert [learning_rate(settings, update, 4) for update in range(5)] == [
        0.5,
        0.375,
        0.25,
        0.125,
        0,
    ]
    assert learning_rate(replace(settings, anneal=False), 3, 4) == 0.5
    rising = replace(settings, anneal=False, warmup_updates=3)
    assert [learning_rate(rising, n, 9) for n in range(5)] == [0.125, 0.25, 0.375, 0.5, 0.5]


# ---- roll-outs -----------------------------------------------------------------------------------


class Counting(VectorEnvironment):
    """Shows (game's number, steps so far) and rewards an action by its number plus the steps.

    Every fifth step is a game's last; game k of environment e is numbered 10 e + k.
    """

    actions = 3
    observation_shape = (2,)
    frames_per_second = 1

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self.games = 10.0 * (first + np.arange(count))
        self.steps = 0

    def reset(self) -> np.ndarray:
        return self._show()

    def step(self, actions: np.ndarray) -> Outcome:
        rewards = (actions + self.steps).astype(np.float32)
        self.steps += 1
        ends = np.full(self.count, self.steps == 5)
        if ends[0]:
            self.steps = 0
            self.games += 1
        return Outcome(self._show(), rewards, ends, self.games[ends].tolist(), ends)

    def render(self) -> np.ndarray:
        return np.zeros((1, 1, 3), np.uint8)

    def _show(self) -> np.ndarray:
        return np.stack([self.games, np.full(self.count, self.steps)], 1).astype(np.float32)


class CountingAlone(Counting):
    """The same with the two halves of a step."""

    def send(self, actions: np.ndarray) -> None:
        self.sent = actions

    def receive(self) -> Outcome:
        return super().step(self.sent)

    def step(self, actions: np.ndarray) -> Outcome:
        raise AssertionError("an environment that can step on its own is sent its actions")


def small_network(spread: float = 1.0, units: int = 8) -> nn.Module:
    model = mlp_policy(3, 2, units)
    nn.init.orthogonal_(model.policy.weight, spread)
    return slimmable(model, None, WidthRange(0.25, 1.0, 2), example_input=torch.rand(2, 2))


def test_a_rollout_holds_what_happened() -> None:
    model = small_network()
    collector = Collector(model, [Counting(2), CountingAlone(2, first=2)], 7, CPU)
    with at_width(model, 0.25):  # whatever width was set, the widest plays
        rollout = collector.collect()
    observations = rollout.observations
    assert observations[:, :, 1].T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 4
    assert observations[:5, :, 0].tolist() == [[0, 10, 20, 30]] * 5
    assert observations[5:, :, 0].tolist() == [[1, 11, 21, 31]] * 3
    expected = rollout.actions[:7] + observations[:7, :, 1]
    assert torch.equal(rollout.rewards[:7], expected)
    assert rollout.ends[:7].T.tolist() == [[0, 0, 0, 0, 1, 0, 0]] * 4
    with torch.no_grad():
        logits, values = model(observations.flatten(0, 1))
    taken = logits.log_softmax(-1).gather(-1, rollout.actions.flatten()[:, None])[:, 0]
    torch.testing.assert_close(rollout.log_probabilities.flatten()[:-4], taken[:-4])
    torch.testing.assert_close(rollout.values.flatten(), values)
    assert sorted(collector.take_scores()) == [1, 11, 21, 31]
    assert collector.take_scores() == []


def test_games_go_on_in_the_next_rollout() -> None:
    collector = Collector(small_network(), [Counting(2)], 3, CPU)
    after = collector.collect().observations[-1].clone()
    assert torch.equal(collector.collect().observations[0], after)


def test_actions_are_drawn_by_their_probabilities() -> None:
    model = small_network(3.0)
    collector = Collector(model, [Counting(500)], 40, CPU)
    rollout = collector.collect()
    with torch.no_grad():
        probabilities = model(rollout.observations[:-1].flatten(0, 1))[0].softmax(-1)
    expected = probabilities.mean(0)
    found = rollout.actions[:-1].flatten().bincount(minlength=3) / 20_000
    assert (expected - 1 / 3).abs().max() > 0.05
    torch.testing.assert_close(found, expected, atol=0.015, rtol=0)


# ---- the learner's data --------------------------------------------------------------------------


def loader(**changes: object) -> RolloutLoader:
    settings = replace(
        SETTINGS,
        environments=4,
        rollout=8,
        batch_size=16,
        epochs=3,
        steps=320,
        **changes,  # type: ignore[arg-type]
    )
    model = mlp_policy(2, 4)
    slimmable(model, None, WidthRange(0.25, 1.0, 4), example_input=torch.rand(2, 4))
    return RolloutLoader(settings, model, CPU)


def test_every_pass_goes_through_the_whole_rollout() -> None:
    data = loader()
    assert (len(data), data.rollouts) == (6, 10)
    batches = list(data.epoch(0))
    assert len(batches) == 6
    assert data.agent_steps == 32
    passes = [torch.cat([batches[2 * n][0], batches[2 * n + 1][0]]) for n in range(3)]
    rows = [sorted(map(tuple, one.tolist())) for one in passes]
    assert rows[0] == rows[1] == rows[2]
    assert len(set(rows[0])) == 32
    assert not torch.equal(passes[0], passes[1])
    for observations, targets in batches:
        assert targets["clip"] == SETTINGS.clip
        assert targets["advantages"].mean().abs() < 1e-5
        logits, values = data.model(observations)
        torch.testing.assert_close(targets["values"], values)
        taken = logits.log_softmax(-1).gather(-1, targets["actions"][:, None])[:, 0]
        torch.testing.assert_close(targets["log_probabilities"], taken)


def test_an_epoch_begun_in_its_middle_has_what_is_left() -> None:
    whole, rest = list(loader().epoch(2)), list(loader().epoch(2, start=4))
    assert len(rest) == len(whole) - 4


def test_clipping_rewards_and_annealing_the_clip() -> None:
    data = loader(anneal_clip=True)
    clips = [next(iter(data.epoch(epoch)))[1]["clip"].item() for epoch in (0, 5)]
    assert clips == pytest.approx([0.1, 0.05])
    plain, clipped = loader(), loader(clip_rewards=True)
    for one in (plain, clipped):
        next(iter(one.epoch(0)))
        one._collector.rollout.rewards.mul_(5)  # type: ignore[union-attr]
    assert plain._rewards(plain._collector.rollout).max() == 5  # type: ignore[union-attr]
    assert clipped._rewards(clipped._collector.rollout).max() == 1  # type: ignore[union-attr]


def test_a_batch_must_divide_the_rollout() -> None:
    model = small_network()
    with pytest.raises(AnywidthError, match="batch-size"):
        RolloutLoader(replace(SETTINGS, batch_size=100), model, CPU)
    with pytest.raises(AnywidthError, match="rollout"):
        replace(SETTINGS, rollout=0).check()
