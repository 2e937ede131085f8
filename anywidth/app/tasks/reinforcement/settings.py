"""Every choice of a reinforcement-learning run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from anywidth.app.runs.settings import option
from anywidth.app.tasks.task_settings import TaskSettings


@dataclass(frozen=True)
class ReinforcementSettings(TaskSettings):
    """The network and the widths are the paper's; PPO's numbers are its authors' for Atari."""

    task: ClassVar[str] = "reinforcement"
    version: ClassVar[int] = 1
    of_us_nets: ClassVar[tuple[str, ...]] = (
        *("widths_per_step", "lattice", "distill", "distill_weight", "dual_clip"),
    )

    environment: str = option(
        "minatar:breakout", "atari:GAME, minatar:GAME, or gym:NAME such as gym:CartPole-v1"
    )
    environments: int = option(8, "games played at once", at_least=1)
    threads: int | None = option(None, "that step Atari games; none: all", at_least=1)
    overlap: bool = option(True, "Atari: half the games step while the others are decided")
    clip_rewards: bool = option(False, "learn from the rewards' signs")

    method: Literal["us", "i"] = option("us", "universally slimmable, or one width alone")
    divisor: int = option(4, "channels are multiples of this", at_least=1)
    distill: Literal["kl", "ppo", "none"] = option(
        "kl",
        "narrower widths learn the widest one's policy and value (kl), by PPO on its games with a "
        "second clip (ppo), or as if they had played them (none)",
    )
    distill_weight: float = option(1.0, "of what narrower widths learn", at_least=0)

    steps: int = option(1_000_000, "agent steps in all", at_least=1)
    rollout: int = option(128, "steps of each game between updates", at_least=1)
    epochs: int = option(4, "passes over each roll-out", at_least=1)
    batch_size: int = option(256, "observations per update", at_least=1)
    learning_rate: float = option(2.5e-4, "of Adam, at its highest", above=0)
    warmup_updates: int = option(0, "rise to it over so many updates", at_least=0)
    anneal: bool = option(True, "the learning rate falls to 0 linearly")
    discount: float = option(0.99, "of later rewards (gamma)", at_least=0, at_most=1)
    smoothing: float = option(0.95, "of advantages (lambda)", at_least=0, at_most=1)
    clip: float = option(0.1, "how far an update may move a probability", above=0)
    anneal_clip: bool = option(False, "it falls to 0 linearly too")
    clip_values: bool = option(True, "and how far a value")
    dual_clip: float = option(3.0, "the second clip of distill=ppo", above=1)
    value_weight: float = option(0.5, "of the value's loss", at_least=0)
    entropy_weight: float = option(0.01, "of the policy's entropy", at_least=0)
    gradient_clip: float = option(0.5, "highest norm of the gradients", above=0)

    curve_games: int = option(10, "played at 4 widths for the curves", at_least=1)
    evaluation_games: int = option(30, "played at each width afterwards", at_least=1)
    longest_game: int | None = option(
        None, "steps after which these games are cut; none: 27,000", at_least=1
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = option(
        "auto", "auto is tf32 on a GPU, float32 on a CPU"
    )
    validate_every: int = option(50, "roll-outs between points of curves", at_least=1)
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
        """Five widths, as each takes many games."""
        between = [width for width in (0.4, 0.5, 0.75) if self.low < width < self.high]
        return [self.low, *between, self.high]

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.method == "us" and self.distill == "none":
            found |= dict.fromkeys(("distill_weight", "dual_clip"), "distill='none'")
        elif self.method == "us" and self.distill == "kl":
            found["dual_clip"] = "distill='kl'"
        return found
