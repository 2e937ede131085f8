"""Every choice of a reinforcement-learning run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anywidth.errors import AnywidthError


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class ReinforcementConfig:
    """The network and the widths are the paper's; PPO's numbers are its authors' for Atari."""

    task: ClassVar[str] = "reinforcement"
    version: ClassVar[int] = 1

    environment: str = field(
        default="minatar:breakout",
        metadata=_help("atari:GAME, minatar:GAME, or gym:NAME such as gym:CartPole-v1"),
    )
    environments: int = field(default=8, metadata=_help("games played at once"))
    threads: int | None = field(default=None, metadata=_help("that step Atari games; none: all"))
    overlap: bool = field(
        default=True, metadata=_help("Atari: half the games step while the others are decided")
    )
    clip_rewards: bool = field(default=False, metadata=_help("learn from the rewards' signs"))

    method: Literal["us", "i"] = field(
        default="us", metadata=_help("universally slimmable, or one width alone")
    )
    low: float = field(default=0.25, metadata=_help("narrowest width"))
    high: float = field(default=1.0, metadata=_help("widest width"))
    divisor: int = field(default=4, metadata=_help("channels are multiples of this"))
    width: float = field(default=1.0, metadata=_help("the one width of an I-Net"))
    widths_per_step: int = field(default=4, metadata=_help("widths trained each update (n)"))
    lattice: int | None = field(default=None, metadata=_help("draw from so many configurations"))
    distill: Literal["kl", "ppo", "none"] = field(
        default="kl",
        metadata=_help(
            "narrower widths learn the widest one's policy and value (kl), by PPO on its games "
            "with a second clip (ppo), or as if they had played them (none)"
        ),
    )
    distill_weight: float = field(default=1.0, metadata=_help("of what narrower widths learn"))

    steps: int = field(default=1_000_000, metadata=_help("agent steps in all"))
    rollout: int = field(default=128, metadata=_help("steps of each game between updates"))
    epochs: int = field(default=4, metadata=_help("passes over each roll-out"))
    batch_size: int = field(default=256, metadata=_help("observations an update"))
    learning_rate: float = field(default=2.5e-4, metadata=_help("of Adam, at its highest"))
    warmup_updates: int = field(default=0, metadata=_help("rise to it over so many updates"))
    anneal: bool = field(default=True, metadata=_help("the learning rate falls to 0 linearly"))
    discount: float = field(default=0.99, metadata=_help("of later rewards (gamma)"))
    smoothing: float = field(default=0.95, metadata=_help("of advantages (lambda)"))
    clip: float = field(default=0.1, metadata=_help("how far an update may move a probability"))
    anneal_clip: bool = field(default=False, metadata=_help("it falls to 0 linearly too"))
    clip_values: bool = field(default=True, metadata=_help("and how far a value"))
    dual_clip: float = field(default=3.0, metadata=_help("the second clip of distill=ppo"))
    value_weight: float = field(default=0.5, metadata=_help("of the value's loss"))
    entropy_weight: float = field(default=0.01, metadata=_help("of the policy's entropy"))
    gradient_clip: float = field(default=0.5, metadata=_help("highest norm of the gradients"))

    curve_games: int = field(default=10, metadata=_help("played at 4 widths for the curves"))
    evaluation_games: int = field(default=30, metadata=_help("played at each width afterwards"))
    longest_game: int | None = field(
        default=None, metadata=_help("steps after which these games are cut; none: 27,000")
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = field(
        default="auto", metadata=_help("auto is tf32 on a GPU, float32 on a CPU")
    )
    device: str = field(default="auto", metadata=_help("auto, cpu, cuda or cuda:N"))
    seed: int = field(default=0, metadata=_help("of everything random"))
    validate_every: int = field(default=50, metadata=_help("roll-outs between points of curves"))
    log_every: int = field(default=5, metadata=_help("roll-outs between rows of metrics.csv"))
    checkpoint_every: int = field(default=50, metadata=_help("roll-outs between checkpoints"))

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


def check_counts(config: ReinforcementConfig) -> None:
    """Refuses what would train or play nothing."""
    names = "environments rollout epochs batch_size steps curve_games evaluation_games"
    for name in [*names.split(), "validate_every", "log_every", "checkpoint_every"]:
        if getattr(config, name) < 1:
            raise AnywidthError(f"{name}={getattr(config, name)}: expected at least 1")
