"""Roll-outs: the widest width plays many games at once, and its experience is recorded.

The learner's data is on the device. On a GPU, a decision for all games (forward, drawing actions,
recording) is one CUDA graph, so a step costs a copy to the device, a replay and a copy back.
Environments that can step in the background are played in two halves: one half steps while the
network decides for the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anywidth.app.tasks.reinforcement.environments import VectorEnvironment
from anywidth.slimming.convert import at_width, plan_of


@dataclass(frozen=True)
class Rollout:
    """A roll-out: one row per step and one more at the end, one column per environment.

    The last row has the observation after the last step, and its value. Rewards, and ends (1 at the
    end of an episode), are on the CPU.
    """

    observations: Tensor
    actions: Tensor
    log_probabilities: Tensor
    values: Tensor
    rewards: Tensor
    ends: Tensor

    @classmethod
    def empty(
        cls, length: int, count: int, observations: np.ndarray, device: torch.device
    ) -> Rollout:
        kind = torch.from_numpy(observations[:1]).dtype
        rows = (length + 1, count)
        return cls(
            torch.zeros(*rows, *observations.shape[1:], dtype=kind, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, device=device),
            torch.zeros(rows, device=device),
            torch.zeros(rows),
            torch.zeros(rows),
        )

    def columns(self, start: int, count: int) -> Rollout:
        """The columns of some environments, in the same memory."""
        parts = (getattr(self, field.name).narrow(1, start, count) for field in fields(self))
        return Rollout(*parts)


class Player:
    """Some environments and the network that plays them, with static buffers."""

    def __init__(
        self,
        model: nn.Module,
        environment: VectorEnvironment,
        observations: np.ndarray,
        rollout: Rollout,
        autocast: torch.dtype | None,
    ) -> None:
        self.model = model
        self.environment = environment
        self.rollout = rollout
        self.autocast = autocast
        self.device = rollout.values.device
        self.scores: list[float] = []
        on_gpu = self.device.type == "cuda"
        seen = torch.from_numpy(np.ascontiguousarray(observations))
        self._seen = seen.pin_memory() if on_gpu else seen.clone()
        self._chosen = torch.zeros(len(seen), dtype=torch.int64, pin_memory=on_gpu)
        self._observations = self._seen.to(self.device)
        self._actions = self._chosen.to(self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def decide(self) -> np.ndarray:
        """Actions for the current observations, recorded in the next row."""
        if self.device.type != "cuda":
            self._decide()
            return self._chosen.numpy().copy()
        self._observations.copy_(self._seen, non_blocking=True)
        if self._graph is None:
            self._capture()
        else:
            self._graph.replay()
        self._chosen.copy_(self._actions, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._chosen.numpy().copy()

    def receive(self, step: int) -> None:
        """Wait for the environments and record the results of row `step`."""
        outcome = self.environment.receive()
        self._seen.numpy()[...] = outcome.observations
        self.rollout.rewards[step] = torch.from_numpy(outcome.rewards)
        self.rollout.ends[step] = torch.from_numpy(outcome.ends.astype(np.float32))
        self.scores += outcome.scores

    @torch.no_grad()
    def _decide(self) -> None:
        with at_width(self.model, plan_of(self.model).widest), self._precision():
            logits, values = self.model(self._observations)
        log_probabilities = logits.float().log_softmax(-1)
        # The argmax of log p - log e, with e exponential, is a draw from p (Gumbel's trick).
        noise = torch.empty_like(log_probabilities).exponential_().log()
        actions = (log_probabilities - noise).argmax(-1)
        found = log_probabilities.gather(-1, actions[:, None])[:, 0]
        rows = self.rollout
        for store, row in (
            (rows.observations, self._observations),
            (rows.actions, actions),
            (rows.log_probabilities, found),
            (rows.values, values.float()),
        ):
            store.index_copy_(0, self.position, row[None])
        self._actions.copy_(actions)
        self.position += 1

    def _capture(self) -> None:
        """Decide once eagerly, then capture a graph for later decisions."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decide()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._decide()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)


class Collector:
    """Plays roll-outs of `length` steps; episodes continue from one roll-out to the next.

    The environments are of one size and kind, and `autocast` is the dtype of forward passes.
    """

    def __init__(
        self,
        model: nn.Module,
        environments: Sequence[VectorEnvironment],
        length: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.length = length
        shown = [environment.reset() for environment in environments]
        counts = [environment.count for environment in environments]
        self.rollout = Rollout.empty(length, sum(counts), shown[0], device)
        self.players = []
        for index, environment in enumerate(environments):
            part = self.rollout.columns(sum(counts[:index]), counts[index])
            self.players.append(Player(model, environment, shown[index], part, autocast))

    def collect(self) -> Rollout:
        """The next roll-out; it is valid until the next call."""
        for player in self.players:
            player.position.zero_()  # recorded from the first row on; the games continue
        for step in range(self.length):
            for player in self.players:
                if step > 0:
                    player.receive(step - 1)
                player.environment.send(player.decide())
        for player in self.players:
            player.receive(self.length - 1)
            player.decide()
        return self.rollout

    def take_scores(self) -> list[float]:
        """The true scores of the games that ended since the last call."""
        scores = [score for player in self.players for score in player.scores]
        for player in self.players:
            player.scores.clear()
        return scores

    def close(self) -> None:
        for player in self.players:
            player.environment.close()
