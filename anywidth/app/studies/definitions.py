"""The studies, one row each: the networks they train and how they measure them."""

from __future__ import annotations

from typing import Any

from anywidth.app.studies import findings
from anywidth.app.studies.study_parts import (
    Measurement,
    Network,
    Picture,
    Setting,
    Study,
    Training,
    training,
)

MOBILENET_V1 = Network("mobilenet_v1", "MobileNet v1", (0.25, 0.5, 0.75, 1.0))
MOBILENET_V2 = Network("mobilenet_v2", "MobileNet v2", (0.35, 0.5, 0.75, 1.0))
WDSR = Network("wdsr", "WDSR", (0.5, 1.0), "super_resolution", step=0.0625)
ATARI_CNN = Network("atari_cnn", "PPO", (0.25, 0.5, 0.75, 1.0), "reinforcement")
NETWORKS = (MOBILENET_V1, MOBILENET_V2, WDSR, ATARI_CNN)

AS_TRAINED = Measurement("as-trained", "trained", "trained")
AT_TABLE = Measurement("table", "trained", "table")
SPECTRUM = Measurement("spectrum", "trained")
CALIBRATED = Measurement("calibrated")
STAGES = Measurement("stages", widths="stages")
SEARCHED = Measurement("searched", widths="searched")
POST_STATISTICS = {
    "moving over all": (Measurement("moving-all", "moving", "table", "all"), "1.28M moving"),
    "exact over all": (Measurement("exact-all", "exact", "table", "all"), "1.28M exact"),
    "exact over 1k": (Measurement("exact-1k", "exact", "table", 1000), "1k exact"),
    "exact over 2k": (Measurement("exact-2k", "exact", "table", 2000), "2k exact"),
    "no post-statistics": (Measurement("cut", "cut", "table"), None),
}

US_V1 = training(MOBILENET_V1)
# Not in the paper, which sums the losses of the widths.
BALANCED_V1 = training(MOBILENET_V1, weights="balanced")
BALANCED_V2 = training(MOBILENET_V2, weights="balanced")
S_V1 = training(MOBILENET_V1, method="s")
I_V1 = tuple(training(MOBILENET_V1, method="i", width=w) for w in MOBILENET_V1.widths)
US_V2 = training(MOBILENET_V2)
S_V2 = training(MOBILENET_V2, method="s")
I_V2 = tuple(training(MOBILENET_V2, method="i", width=w) for w in MOBILENET_V2.widths)
MAIN = ((MOBILENET_V1, US_V1, S_V1, I_V1), (MOBILENET_V2, US_V2, S_V2, I_V2))
NONUNIFORM = training(MOBILENET_V1, nonuniform=True)
# Images kept out of training judge a search. Configurations that come again can be captured.
DRAWN = 512
SEARCHABLE = {
    network: (
        training(network, nonuniform=True, held_out=0.1),
        training(network, nonuniform=True, held_out=0.1, lattice=DRAWN),
    )
    for network in (MOBILENET_V1, MOBILENET_V2)
}
# As many configurations as with d = 8: captured graphs of all 1,513 do not fit in memory.
US_V1_BY_ONE = training(MOBILENET_V1, divisor=1, lattice=187)
I_WDSR = tuple(training(WDSR, method="i", width=width) for width in WDSR.widths)
I_PPO = tuple(training(ATARI_CNN, method="i", width=width) for width in ATARI_CNN.widths)
# Only `drawn-widths` draws from so few configurations, to show the effect.
FEW = 16
# Minutes are an eighth of the sum over trainings: eight ran side by side under MPS.
H200 = "CIFAR-10, an H200"


def _us(label: str, one: Training = US_V1, paper: tuple[str, str] | None = None) -> Setting:
    """A line of MobileNet v1; without changes it is the paper's default US-Net."""
    if one == US_V1 and paper is None:
        paper = ("main", "us-net")
    return Setting(label, MOBILENET_V1, (one,), CALIBRATED, paper=paper)


def _against_alone(
    network: Network, us: Training, s: Training, i: tuple[Training, ...]
) -> tuple[Setting, ...]:
    """A US-Net as in the paper, and what the paper compares it with."""
    return (
        Setting("I-Net", network, i, AS_TRAINED, kind="i", paper=("main", "i-net")),
        Setting("S-Net", network, (s,), AS_TRAINED, kind="s", paper=("main", "s-net")),
        Setting("US-Net", network, (us,), CALIBRATED, paper=("main", "us-net")),
    )


def _without_distillation(rule: str) -> Training:
    return training(MOBILENET_V1, rule=rule, widths_per_step=3, distill=False)


def _us_wdsr(label: str, **changes: Any) -> Setting:
    return Setting(label, WDSR, (training(WDSR, **changes),), SPECTRUM)


STUDIES: tuple[Study, ...] = (
    Study(
        "main",
        "table 1, figures 1 and 3",
        "individually trained networks (I-Net), four switches (S-Net) and one network for all "
        "widths (US-Net), MobileNet v1 and v2",
        tuple(setting for one in MAIN for setting in _against_alone(*one)),
        findings.main,
        pictures=(
            Picture(
                "main-figure-1",
                "One MobileNet v1 for all widths, four trained for one width each",
                MOBILENET_V1,
                ("US-Net", "I-Net"),
                {
                    "US-Net": "one network for all widths (US-Net)",
                    "I-Net": "trained for one width alone (I-Net)",
                },
            ),
            Picture(
                "main-figure-3-mobilenet_v1",
                "MobileNet v1",
                MOBILENET_V1,
                ("US-Net", "S-Net", "I-Net"),
            ),
            Picture(
                "main-figure-3-mobilenet_v2",
                "MobileNet v2",
                MOBILENET_V2,
                ("US-Net", "S-Net", "I-Net"),
            ),
        ),
        seeds=3,
        minutes={"bundled images, two cores": 27, H200: 9.5},
    ),
    Study(
        "balanced-losses",
        None,
        "the networks of `main`, and US-Nets whose narrower widths together weigh as much as the "
        "widest (the default of `anywidth train`)",
        tuple(
            setting
            for one, balanced in zip(MAIN, (BALANCED_V1, BALANCED_V2), strict=True)
            for setting in (
                Setting(findings.BALANCED, one[0], (balanced,), CALIBRATED),
                *_against_alone(*one),
            )
        ),
        findings.balanced_losses,
        pictures=(
            Picture(
                "balanced-losses-alone",
                "One MobileNet v1 for all widths, four trained for one width each",
                MOBILENET_V1,
                (findings.BALANCED, "I-Net"),
                {
                    findings.BALANCED: "one network for all widths",
                    "I-Net": "trained for one width alone",
                },
            ),
            *(
                Picture(
                    f"balanced-losses-{network.name}",
                    f"{network.title}, losses of the widths balanced or summed",
                    network,
                    (findings.BALANCED, "US-Net", "S-Net", "I-Net"),
                    {
                        findings.BALANCED: "US-Net, balanced losses",
                        "US-Net": "US-Net, sum of losses",
                    },
                )
                for network in (MOBILENET_V1, MOBILENET_V2)
            ),
        ),
        seeds=2,
        minutes={H200: 12.5},
    ),
    Study(
        "sampling-rule",
        "table 2",
        "which three widths a step visits, without distillation",
        tuple(
            _us(label, _without_distillation(rule), ("sampling_rule", paper))
            for label, rule, paper in (
                ("3 random", "random", "3 random"),
                ("min + 2 random", "min+random", "min+2 random"),
                ("max + 2 random", "max+random", "max+2 random"),
                ("min + 1 random + max", "sandwich", "min+1 random+max"),
            )
        ),
        findings.sampling_rule,
        seeds=2,
        minutes={H200: 4.5},
    ),
    Study(
        "distillation",
        "figure 6",
        "narrow widths that learn from the full width, from true labels, or from both",
        (
            _us("inplace distillation"),
            _us("true labels alone", training(MOBILENET_V1, distill=False)),
            _us("half true labels", training(MOBILENET_V1, truth=0.5)),
        ),
        findings.distillation,
        seeds=3,
        minutes={H200: 5},
    ),
    Study(
        "bn-statistics",
        "table 3",
        "batch-norm statistics after training: averages over all or few images, or none",
        tuple(
            Setting(
                label,
                MOBILENET_V1,
                (US_V1,),
                measurement,
                kind="us" if paper else "control",
                paper=("bn_statistics", paper) if paper else None,
            )
            for label, (measurement, paper) in POST_STATISTICS.items()
        ),
        findings.bn_statistics,
        minutes={H200: 1.5},
    ),
    Study(
        "lower-bound",
        "figure 7",
        "the narrowest width trained, k0 = 0.25, 0.35 and 0.05",
        (
            _us("k0 = 0.25"),
            _us("k0 = 0.35", training(MOBILENET_V1, low=0.35)),
            _us("k0 = 0.05", training(MOBILENET_V1, low=0.05)),
        ),
        findings.lower_bound,
        widths=(0.05, 0.25, 0.35, 0.5, 0.75, 1.0),
        minutes={H200: 5},
    ),
    Study(
        "divisor",
        "figure 8",
        "channels in multiples of d = 8 and of 1",
        (_us("d = 8"), _us("d = 1", US_V1_BY_ONE)),
        findings.divisor,
        minutes={H200: 3.5},
    ),
    Study(
        "number-of-widths",
        "figure 9",
        "n = 3, 4 and 5 widths per step",
        (
            _us("n = 3", training(MOBILENET_V1, widths_per_step=3)),
            _us("n = 4"),
            _us("n = 5", training(MOBILENET_V1, widths_per_step=5)),
        ),
        findings.number_of_widths,
        minutes={H200: 4},
    ),
    Study(
        "drawn-widths",
        None,
        f"random widths drawn from all configurations, or from {FEW} of them",
        (
            _us("n = 4, all"),
            _us(f"n = 4, {FEW}", training(MOBILENET_V1, lattice=FEW)),
            _us("n = 5, all", training(MOBILENET_V1, widths_per_step=5)),
            _us(f"n = 5, {FEW}", training(MOBILENET_V1, widths_per_step=5, lattice=FEW)),
        ),
        findings.drawn_widths,
        minutes={H200: 7},
    ),
    Study(
        "nonuniform",
        "figure 10",
        "a network trained with a separate width per layer, one stage of five narrowed by 0.6",
        (
            _us("trained uniform"),
            Setting("uniform", MOBILENET_V1, (NONUNIFORM,), STAGES, "uniform"),
            *(
                Setting(f"stage {i}", MOBILENET_V1, (NONUNIFORM,), STAGES, f"stage {i}")
                for i in range(1, 6)
            ),
        ),
        findings.nonuniform,
        pictures=(
            Picture(
                "nonuniform",
                "One stage of MobileNet v1 narrowed by a further 0.6",
                MOBILENET_V1,
                ("uniform", "stage 1", "stage 4", "stage 5"),
            ),
        ),
        minutes={H200: 4},
    ),
    Study(
        "search",
        None,
        "channels that a search finds for the multiply-adds of widths 0.5 and 0.7, against these "
        f"widths; nonuniform widths in training drawn from all or from {DRAWN} configurations",
        tuple(
            Setting(f"{part}{ending}", network, (one,), SEARCHED, part, kind)
            for network, trainings in SEARCHABLE.items()
            for one, ending in zip(trainings, ("", f", {DRAWN}"), strict=True)
            for part, kind in (("uniform", "us"), ("searched", "i"))
        ),
        findings.search,
        widths=(0.5, 0.7),
        seeds=3,
    ),
    Study(
        "naturally-slimmable",
        "figure 11",
        "US-Net, S-Net and an ordinary network, all calibrated at every width",
        (
            _us("US-Net"),
            Setting("S-Net", MOBILENET_V1, (S_V1,), CALIBRATED),
            Setting("sliced I-Net 1.0", MOBILENET_V1, I_V1[-1:], CALIBRATED, kind="control"),
        ),
        findings.naturally_slimmable,
        minutes={H200: 3},
    ),
    Study(
        "output-averaging",
        "table 4",
        "US-MobileNet v1 with and without output averaging",
        (
            _us("US-Net", US_V1, ("output_averaging", "off")),
            _us(
                "output averaging",
                training(MOBILENET_V1, average_outputs=True),
                ("output_averaging", "on"),
            ),
        ),
        findings.output_averaging,
        minutes={H200: 3.5},
    ),
    Study(
        "super-resolution",
        "figure 4",
        "WDSR for all widths, with l1 distillation or without, and trained individually",
        (
            Setting("I-Net", WDSR, I_WDSR, AS_TRAINED, kind="i"),
            _us_wdsr("US-Net, l1 distillation and truth", distill="l1", truth=0.9),
            _us_wdsr("US-Net, l1 distillation", distill="l1"),
            _us_wdsr("US-Net, no distillation", distill="none"),
        ),
        findings.super_resolution,
        pictures=(
            # Without l1 distillation alone, which would squeeze the others.
            Picture(
                "super-resolution",
                "x2 super-resolution with WDSR",
                WDSR,
                ("US-Net, l1 distillation and truth", "US-Net, no distillation", "I-Net"),
            ),
        ),
    ),
    Study(
        "super-resolution-l2",
        None,
        "WDSR for all widths, with l2 distillation (the default) or without",
        (
            Setting("I-Net", WDSR, I_WDSR, AS_TRAINED, kind="i"),
            _us_wdsr("US-Net"),
            _us_wdsr("US-Net, no distillation", distill="none"),
        ),
        findings.super_resolution,
    ),
    Study(
        "reinforcement",
        "figure 5",
        "PPO on Breakout: one network for all widths, and four trained individually",
        (
            Setting("US-Net", ATARI_CNN, (training(ATARI_CNN),), AT_TABLE),
            Setting("I-Net", ATARI_CNN, I_PPO, AS_TRAINED, kind="i"),
            Setting("I-Net 1.0, sliced", ATARI_CNN, I_PPO[-1:], AT_TABLE, kind="control"),
        ),
        findings.reinforcement,
        curves="score",
    ),
)
