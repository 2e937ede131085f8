"""The studies, one row each: the networks they train and how they measure them."""

from __future__ import annotations

from typing import Any

from anywidth.app.studies import findings
from anywidth.app.studies.study_parts import (
    MOBILENET_V1,
    MOBILENET_V2,
    Measurement,
    Network,
    Picture,
    Setting,
    Study,
    training,
)

WDSR = Network("wdsr", "WDSR", (0.5, 1.0), "super_resolution", step=0.0625)
ATARI_CNN = Network("atari_cnn", "PPO", (0.25, 0.5, 0.75, 1.0), "reinforcement")
MOBILENETS = (MOBILENET_V1, MOBILENET_V2)

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
S_V1 = training(MOBILENET_V1, method="s")
NONUNIFORM = training(MOBILENET_V1, nonuniform=True)
# Images kept out of training judge a search. Configurations that come again can be captured.
_ALL_DRAWN = {"nonuniform": True, "held_out": 0.1}
SEARCHABLE = {"": _ALL_DRAWN, f", {findings.DRAWN}": _ALL_DRAWN | {"lattice": findings.DRAWN}}
# As many configurations as with d = 8: captured graphs of all 1,513 do not fit in memory.
AS_MANY_AS_BY_EIGHT = 187
# Only `drawn-widths` draws from so few configurations, to show the effect.
FEW = 16
# Minutes are an eighth of the sum over trainings: eight ran side by side under MPS.
H200 = "CIFAR-10, an H200"


def _us(
    label: str,
    network: Network = MOBILENET_V1,
    measurement: Measurement = CALIBRATED,
    paper: tuple[str, str] | None = None,
    **changes: Any,
) -> Setting:
    """A US-Net; a MobileNet without changes is the paper's default."""
    if network in MOBILENETS and not changes:
        paper = paper or ("main", "us-net")
    return Setting(label, network, (training(network, **changes),), measurement, paper=paper)


def _i(network: Network, paper: tuple[str, str] | None = None) -> Setting:
    """One network per width of the table."""
    alone = tuple(training(network, method="i", width=width) for width in network.widths)
    return Setting("I-Net", network, alone, AS_TRAINED, kind="i", paper=paper)


def _main(network: Network) -> tuple[Setting, ...]:
    """A US-Net as in the paper, and what the paper compares it with."""
    s = training(network, method="s")
    return (
        _i(network, ("main", "i-net")),
        Setting("S-Net", network, (s,), AS_TRAINED, kind="s", paper=("main", "s-net")),
        _us("US-Net", network),
    )


def _sliced(label: str, network: Network, measurement: Measurement) -> Setting:
    """An ordinary network of full width, also run narrower."""
    alone = training(network, method="i", width=1.0)
    return Setting(label, network, (alone,), measurement, kind="control")


STUDIES: tuple[Study, ...] = (
    Study(
        "main",
        "table 1, figures 1 and 3",
        "individually trained networks (I-Net), four switches (S-Net) and one network for all "
        "widths (US-Net), MobileNet v1 and v2",
        tuple(setting for network in MOBILENETS for setting in _main(network)),
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
            *(
                Picture(f"main-figure-3-{one.name}", one.title, one, ("US-Net", "S-Net", "I-Net"))
                for one in MOBILENETS
            ),
        ),
        seeds=3,
        minutes={"bundled images, two cores": 27, H200: 9.5},
    ),
    Study(
        "balanced-losses",
        None,
        "the networks of `main`, and US-Nets whose narrower widths together weigh as much as the "
        "widest (the default of `anywidth train`); MobileNet v2 also with half true labels, as in "
        "its recipe",
        # Not in the paper, which sums the losses of the widths.
        (
            _us(findings.BALANCED, MOBILENET_V1, weights="balanced"),
            *_main(MOBILENET_V1),
            _us(findings.BALANCED, MOBILENET_V2, weights="balanced"),
            _us(findings.HALF_TRUE, MOBILENET_V2, weights="balanced", truth=0.5),
            *_main(MOBILENET_V2),
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
                    (findings.BALANCED, "US-Net", *more, "S-Net", "I-Net"),
                    {
                        findings.BALANCED: "US-Net, balanced losses",
                        findings.HALF_TRUE: "US-Net, balanced losses, half true labels",
                        "US-Net": "US-Net, sum of losses",
                    },
                )
                for network, more in (
                    (MOBILENET_V1, ()),
                    (MOBILENET_V2, (findings.HALF_TRUE,)),
                )
            ),
        ),
        seeds=2,
        minutes={H200: 11.5},
    ),
    Study(
        "sampling-rule",
        "table 2",
        "which three widths a step visits, without distillation",
        tuple(
            _us(label, paper=("sampling_rule", paper), rule=rule, widths_per_step=3, distill=False)
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
            _us("true labels alone", distill=False),
            _us("half true labels", truth=0.5),
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
        (_us("k0 = 0.25"), _us("k0 = 0.35", low=0.35), _us("k0 = 0.05", low=0.05)),
        findings.lower_bound,
        widths=(0.05, 0.25, 0.35, 0.5, 0.75, 1.0),
        minutes={H200: 5},
    ),
    Study(
        "divisor",
        "figure 8",
        "channels in multiples of d = 8 and of 1",
        (_us("d = 8"), _us("d = 1", divisor=1, lattice=AS_MANY_AS_BY_EIGHT)),
        findings.divisor,
        minutes={H200: 3.5},
    ),
    Study(
        "number-of-widths",
        "figure 9",
        "n = 3, 4 and 5 widths per step",
        (_us("n = 3", widths_per_step=3), _us("n = 4"), _us("n = 5", widths_per_step=5)),
        findings.number_of_widths,
        minutes={H200: 4},
    ),
    Study(
        "drawn-widths",
        None,
        f"random widths drawn from all configurations, or from {FEW} of them",
        (
            _us("n = 4, all"),
            _us(f"n = 4, {FEW}", lattice=FEW),
            _us("n = 5, all", widths_per_step=5),
            _us(f"n = 5, {FEW}", widths_per_step=5, lattice=FEW),
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
            *(
                Setting(part, MOBILENET_V1, (NONUNIFORM,), STAGES, part)
                for part in ("uniform", *(f"stage {number}" for number in range(1, 6)))
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
        "widths; nonuniform widths in training drawn from all or from "
        f"{findings.DRAWN} configurations",
        tuple(
            Setting(
                f"{part}{drawn}", network, (training(network, **changes),), SEARCHED, part, kind
            )
            for network in MOBILENETS
            for drawn, changes in SEARCHABLE.items()
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
            _sliced("sliced I-Net 1.0", MOBILENET_V1, CALIBRATED),
        ),
        findings.naturally_slimmable,
        minutes={H200: 3},
    ),
    Study(
        "output-averaging",
        "table 4",
        "US-MobileNet v1 with and without output averaging",
        (
            _us("US-Net", paper=("output_averaging", "off")),
            _us("output averaging", paper=("output_averaging", "on"), average_outputs=True),
        ),
        findings.output_averaging,
        minutes={H200: 3.5},
    ),
    Study(
        "super-resolution",
        "figure 4",
        "WDSR for all widths, with l1 distillation or without, and trained individually",
        (
            _i(WDSR),
            _us("US-Net, l1 distillation and truth", WDSR, SPECTRUM, distill="l1", truth=0.9),
            _us("US-Net, l1 distillation", WDSR, SPECTRUM, distill="l1"),
            _us("US-Net, no distillation", WDSR, SPECTRUM, distill="none"),
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
            _i(WDSR),
            _us("US-Net", WDSR, SPECTRUM),
            _us("US-Net, no distillation", WDSR, SPECTRUM, distill="none"),
        ),
        findings.super_resolution,
    ),
    Study(
        "reinforcement",
        "figure 5",
        "PPO on Breakout: one network for all widths, and four trained individually",
        (
            _us("US-Net", ATARI_CNN, AT_TABLE),
            _i(ATARI_CNN),
            _sliced("I-Net 1.0, sliced", ATARI_CNN, AT_TABLE),
        ),
        findings.reinforcement,
        curves="score",
    ),
)
