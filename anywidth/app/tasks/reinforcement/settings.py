"""Every choice of a reinforcement-learning run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anywidth.app.runs.settings import about, check_ranges
from anywidth.app.tasks.width_choices import check_widths


@dataclass(frozen=True)
class ReinforcementSettings:
    """The network and the widths are the paper's; PPO's numbers are its authors' for Atari."""

    task: ClassVar[str] = "reinforcement"
    version: ClassVar[int] = 1

    environment: str = field(
        default="minatar:breakout",
        metadata=about("atari:GAME, minatar:GAME, or gym:NAME such as gym:CartPole-v1"),
    )
    environments: int = field(default=8, metadata=about("games played at once", at_least=1))
    threads: int | None = field(
        default=None, metadata=about("that step Atari games; none: all", at_least=1)
    )
    overlap: bool = field(
        default=True, metadata=about("Atari: half the games step while the others are decided")
    )
    clip_rewards: bool = field(default=False, metadata=about("learn from the rewards' signs"))

    method: Literal["us", "i"] = field(
        default="us", metadata=about("universally slimmable, or one width alone")
    )
    low: float = field(default=0.25, metadata=about("narrowest width", above=0, at_most=1))
    high: float = field(default=1.0, metadata=about("widest width", above=0, at_most=1))
    divisor: int = field(default=4, metadata=about("channels are multiples of this", at_least=1))
    width: float = field(
        default=1.0, metadata=about("the one width of an I-Net", above=0, at_most=1)
    )
    widths_per_step: int = field(
        default=4, metadata=about("widths trained each update (n)", at_least=1)
    )
    lattice: int | None = field(
        default=None, metadata=about("draw from so many widths; those between may fail", at_least=2)
    )
    distill: Literal["kl", "ppo", "none"] = field(
        default="kl",
        metadata=about(
            "narrower widths learn the widest one's policy and value (kl), by PPO on its games "
            "with a second clip (ppo), or as if they had played them (none)"
        ),
    )
    distill_weight: float = field(
        default=1.0, metadata=about("of what narrower widths learn", at_least=0)
    )

    steps: int = field(default=1_000_000, metadata=about("agent steps in all", at_least=1))
    rollout: int = field(
        default=128, metadata=about("steps of each game between updates", at_least=1)
    )
    epochs: int = field(default=4, metadata=about("passes over each roll-out", at_least=1))
    batch_size: int = field(default=256, metadata=about("observations an update", at_least=1))
    learning_rate: float = field(default=2.5e-4, metadata=about("of Adam, at its highest", above=0))
    warmup_updates: int = field(
        default=0, metadata=about("rise to it over so many updates", at_least=0)
    )
    anneal: bool = field(default=True, metadata=about("the learning rate falls to 0 linearly"))
    discount: float = field(
        default=0.99, metadata=about("of later rewards (gamma)", at_least=0, at_most=1)
    )
    smoothing: float = field(
        default=0.95, metadata=about("of advantages (lambda)", at_least=0, at_most=1)
    )
    clip: float = field(
        default=0.1, metadata=about("how far an update may move a probability", above=0)
    )
    anneal_clip: bool = field(default=False, metadata=about("it falls to 0 linearly too"))
    clip_values: bool = field(default=True, metadata=about("and how far a value"))
    dual_clip: float = field(default=3.0, metadata=about("the second clip of distill=ppo", above=1))
    value_weight: float = field(default=0.5, metadata=about("of the value's loss", at_least=0))
    entropy_weight: float = field(
        default=0.01, metadata=about("of the policy's entropy", at_least=0)
    )
    gradient_clip: float = field(
        default=0.5, metadata=about("highest norm of the gradients", above=0)
    )

    curve_games: int = field(
        default=10, metadata=about("played at 4 widths for the curves", at_least=1)
    )
    evaluation_games: int = field(
        default=30, metadata=about("played at each width afterwards", at_least=1)
    )
    longest_game: int | None = field(
        default=None,
        metadata=about("steps after which these games are cut; none: 27,000", at_least=1),
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = field(
        default="auto", metadata=about("auto is tf32 on a GPU, float32 on a CPU")
    )
    device: str = field(default="auto", metadata=about("auto, cpu, cuda or cuda:N"))
    seed: int = field(default=0, metadata=about("of everything random", at_least=0, below=2**32))
    validate_every: int = field(
        default=50, metadata=about("roll-outs between points of curves", at_least=1)
    )
    log_every: int = field(
        default=5, metadata=about("roll-outs between rows of metrics.csv", at_least=1)
    )
    checkpoint_every: int = field(
        default=50, metadata=about("roll-outs between checkpoints", at_least=1)
    )

    @property
    def data(self) -> str:
        """What is played, in a report."""
        return self.environment

    @property
    def name(self) -> str:
        """What the network is called in plots and tables."""
        if self.method == "i":
            return "I-PPO"
        endings = {"kl": "", "ppo": ", PPO at all widths", "none": ", no distillation"}
        return "US-PPO" + endings[self.distill]


def check_choices(settings: ReinforcementSettings) -> None:
    """Refuses what would train or play nothing, or would be passed over without a word."""
    check_ranges(settings)
    check_widths(settings)


def unread_fields(settings: ReinforcementSettings) -> dict[str, str]:
    """Fields that nothing reads → the choice that makes it so."""
    if settings.method == "i":
        names = ("widths_per_step", "lattice", "distill", "distill_weight", "dual_clip")
        return dict.fromkeys(names, "method='i'")
    if settings.distill == "none":
        return dict.fromkeys(("distill_weight", "dual_clip"), "distill='none'")
    return {"dual_clip": "distill='kl'"} if settings.distill == "kl" else {}
