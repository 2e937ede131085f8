"""The settings of a reinforcement-learning run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from anywidth.app.runs.settings import option
from anywidth.app.tasks.task_settings import TaskSettings


@dataclass(frozen=True)
class ReinforcementSettings(TaskSettings):
    """The settings of a run; network and widths as in the paper, PPO as its authors use it."""

    task: ClassVar[str] = "reinforcement"
    version: ClassVar[int] = 3  # earlier versions lack some fields
    of_us_nets: ClassVar[tuple[str, ...]] = (
        *TaskSettings.of_us_nets,
        *("distill", "distill_weight", "dual_clip"),
    )

    environment: str = option(
        "minatar:breakout", "atari:GAME, minatar:GAME, or gym:NAME such as gym:CartPole-v1"
    )
    environments: int = option(8, "games played at once", at_least=1, at_most=2**16)
    threads: int | None = option(
        None, "threads for Atari games; none uses all", at_least=1, at_most=1024
    )
    overlap: bool = option(
        True, "Atari: half of the games step while the network decides for the others"
    )
    clip_rewards: bool = option(False, "learn from the signs of rewards")

    method: Literal["us", "i"] = option("us", "universally slimmable (us), or one width (i)")
    divisor: int = option(4, "channels are multiples of this", at_least=1)
    distill: Literal["kl", "ppo", "none"] = option(
        "kl",
        "narrower widths learn the policy and value of the widest (kl), by PPO on its games with "
        "a second clip (ppo), or by PPO as if they had played (none)",
    )
    distill_weight: float = option(1.0, "weight of the loss of narrower widths", at_least=0)

    steps: int = option(1_000_000, "agent steps in all", at_least=1)
    rollout: int = option(128, "steps of each game between updates", at_least=1)
    epochs: int = option(4, "passes over each roll-out", at_least=1)
    batch_size: int = option(256, "observations per update", at_least=1)
    learning_rate: float = option(2.5e-4, "highest learning rate of Adam", above=0)
    warmup_updates: int = option(0, "updates of warm-up", at_least=0)
    anneal: bool = option(True, "the learning rate falls to 0 linearly")
    discount: float = option(0.99, "discount of later rewards (gamma)", at_least=0, at_most=1)
    smoothing: float = option(0.95, "smoothing of advantages (lambda)", at_least=0, at_most=1)
    clip: float = option(0.1, "how far an update may change a probability", above=0)
    anneal_clip: bool = option(False, "the clip falls to 0 linearly")
    clip_values: bool = option(True, "also limit changes of values")
    dual_clip: float = option(3.0, "the second clip of distill=ppo", above=1)
    value_weight: float = option(0.5, "weight of the value's loss", at_least=0)
    entropy_weight: float = option(0.01, "weight of the policy's entropy", at_least=0)
    gradient_clip: float = option(0.5, "largest norm of the gradients", above=0)

    curve_games: int = option(10, "games at each of 4 widths, for the learning curves", at_least=1)
    evaluation_games: int = option(30, "games at each width after training", at_least=1)
    longest_game: int | None = option(
        None, "steps after which these games are cut off; none: 27,000", at_least=1
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = option(
        "auto", "auto is tf32 on a GPU, float32 on a CPU"
    )
    validate_every: int = option(50, "roll-outs between points of the curves", at_least=1)
    log_every: int = option(5, "roll-outs between rows of metrics.csv", at_least=1)
    checkpoint_every: int = option(50, "roll-outs between checkpoints", at_least=1)

    @property
    def network(self) -> str:
        endings = {"ppo": ", PPO at all widths", "none": ", no distillation"}
        return "PPO" + (endings.get(self.distill, "") if self.method == "us" else "")

    @property
    def trained_on(self) -> str:
        return self.environment

    def trained_widths(self) -> list[float]:
        """Five widths, because each needs many games."""
        between = [width for width in (0.4, 0.5, 0.75) if self.low < width < self.high]
        return list(dict.fromkeys([self.low, *between, self.high]))

    def named_code(self) -> str | None:
        """Gymnasium imports `module` for an environment `gym:module:Name`."""
        return "environment" if self.environment.count(":") > 1 else None

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.method == "us" and self.distill == "none":
            found |= dict.fromkeys(("distill_weight", "dual_clip"), self.given("distill"))
        elif self.method == "us" and self.distill == "kl":
            found["dual_clip"] = self.given("distill")
        if self.method == "us" and self.distill != "kl":
            found["teacher"] = self.given("distill")
        return found
