"""Which of the paper's findings hold, study by study."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from anywidth.app.showing.spectrum_tables import format_width
from anywidth.app.studies.comparing import (
    CLOSE_PSNR,
    GUESSING,
    Finding,
    Results,
    Verdict,
    compare,
    judge,
    spell,
    spell_margin,
)
from anywidth.measuring.spectra import Spectrum

ERROR = "top1_error"
V1, V2 = "mobilenet_v1", "mobilenet_v2"
TABLE = (0.25, 0.5, 0.75, 1.0)
# The label of a US-Net whose narrower widths together weigh as much as the widest.
BALANCED = "US-Net, balanced"
SWITCHES = {V1: TABLE, V2: (0.35, 0.5, 0.75, 1.0)}

# "Better" means a visible difference, in points; errors have two decimals.
BETTER = -0.01
# "Higher" means a visible difference in a score, which has one decimal.
HIGHER_SCORE = 0.05
# "As good as" means at most this much worse, in points; the paper's own differences are 0.1.
SAME = 0.2
# "Fails" means at least this much worse, in points.
FAILURE = 5.0
# What a search should gain at the multiply-adds of a width, in points.
SEARCH_GAINS = {0.5: 0.3, 0.7: 0.2}
# "Close" means at most this much worse, in points.
CLOSE = 0.5


def main(results: Results) -> list[Finding]:
    found = []
    for network, name in ((V1, "US-MobileNet v1"), (V2, "US-MobileNet v2")):
        widths = SWITCHES[network]
        claims = (
            ("is on average no worse than individual networks", "I-Net", widths, 0.0),
            ("is better at the narrowest width", "I-Net", widths[:1], BETTER),
            ("is close at full width", "I-Net", widths[-1:], CLOSE),
            ("is on average no worse than four switches", "S-Net", widths, 0.0),
        )
        for claim, other, where, limit in claims:
            one = compare(f"{name} {claim}", results, network, "US-Net", other, where, limit)
            found.append(one)
    return found


def balanced_losses(results: Results) -> list[Finding]:
    """What we ask of balanced losses, which the paper does not have."""
    found = []
    for network, name in ((V1, "MobileNet v1"), (V2, "MobileNet v2")):
        widths = SWITCHES[network]
        claims: list[tuple[str, str, Sequence[float]]] = [
            (f"is no worse than alone at {format_width(width)}", "I-Net", (width,))
            for width in widths
        ]
        claims += [("is on average better than four switches", "S-Net", widths)]
        claims += [("is on average better than the paper's sum", "US-Net", widths)]
        for claim, other, where in claims:
            limit = BETTER if "better" in claim else 0.0
            text = f"Balanced, {name} {claim}"
            found.append(compare(text, results, network, BALANCED, other, where, limit))
    return found


def sampling_rule(results: Results) -> list[Finding]:
    better = partial(compare, results=results, network=V1, widths=TABLE, limit=BETTER)
    sandwich = "min + 1 random + max"
    claim = "Training the narrowest width matters more than training the widest"
    return [
        *(
            better(f"The sandwich rule beats {rule}", one=sandwich, other=rule)
            for rule in ("3 random", "min + 2 random", "max + 2 random")
        ),
        better(claim, one="min + 2 random", other="max + 2 random"),
    ]


def distillation(results: Results) -> list[Finding]:
    label = "inplace distillation"
    widths = results.widths((V1, label))
    better = partial(compare, results=results, network=V1, one=label, widths=widths, limit=BETTER)
    return [
        better("Inplace distillation helps", other="true labels alone"),
        better("Mixing true labels into it is worse", other="half true labels"),
    ]


def bn_statistics(results: Results) -> list[Finding]:
    """Of one network, so that there is no chance in it."""
    exact = "exact over all"
    same = partial(compare, results=results, network=V1, widths=TABLE, limit=SAME, noise=0.0)
    failing = partial(compare, results=results, network=V1, widths=TABLE[:-1], noise=0.0)
    claim = "Without post-statistics narrow widths fail"
    return [
        *(
            same(f"{few} images calibrate as well as all", one=f"exact over {few}", other=exact)
            for few in ("1k", "2k")
        ),
        same("Exact averages are as good as moving ones", one=exact, other="moving over all"),
        failing(claim, one="no post-statistics", other=exact, limit=FAILURE, at_least=True),
    ]


def lower_bound(results: Results) -> list[Finding]:
    first, second = "k0 = 0.25", "k0 = 0.35"
    above = partial(compare, results=results, network=V1, widths=results.widths((V1, second)))
    costs = "Training down to 0.05 costs accuracy at the widths above"
    return [
        above(costs, one=first, other="k0 = 0.05", limit=BETTER),
        above("Training down to 0.35 only is no worse there", one=second, other=first),
    ]


def divisor(results: Results) -> list[Finding]:
    widths = results.widths((V1, "d = 8"))
    claim = "A divisor of 8 is slightly better than 1"
    return [compare(claim, results, V1, "d = 8", "d = 1", widths, BETTER)]


def number_of_widths(results: Results) -> list[Finding]:
    widths = results.widths((V1, "n = 4"))
    claim = "Four widths per step are better than three"
    return [
        compare(claim, results, V1, "n = 4", "n = 3", widths, BETTER),
        compare("Four are as good as five", results, V1, "n = 4", "n = 5", widths, SAME),
    ]


def drawn_widths(results: Results) -> list[Finding]:
    """A width that fails stands out between its neighbours."""
    lines = list(results.spectra)
    worst = {line: max(map(_highest_peak, results.seeds(line).values())) for line in lines}
    few = [line for line in lines if not line[1].endswith("all")]
    among_few = max(few, key=lambda line: worst[line])
    among_all = max((line for line in lines if line not in few), key=lambda line: worst[line])
    errors = [
        error for line in lines for error in results.means(line, results.widths(line)).values()
    ]
    guessing = results.learned_nothing(errors)
    found = []
    for claim, line, is_bad in (
        ("A width between those that were drawn can fail", among_few, True),
        ("If all widths are drawn, none fails", among_all, False),
    ):
        height, width = worst[line]
        holds = (height >= FAILURE) == is_bad
        text = f"{claim}: {line[1]} at {format_width(width)} is {height:.2f} points above both its "
        text += f"neighbours, the most of all such lines{GUESSING if guessing else ''}."
        verdict = Verdict.HOLDS if holds else Verdict.FAILS
        found.append(Finding(Verdict.OPEN if guessing else verdict, text))
    return found


def _highest_peak(spectrum: Spectrum) -> tuple[float, float]:
    """How far the worst width's error is above both neighbours, and that width."""
    known = sorted((p.width, p.metrics[ERROR]) for p in spectrum.points if p.width is not None)
    return max(
        (error - max(before, after), width)
        for (_, before), (width, error), (_, after) in zip(
            known, known[1:], known[2:], strict=False
        )
    )


def output_averaging(results: Results) -> list[Finding]:
    claim = "Output averaging helps on average"
    return [compare(claim, results, V1, "output averaging", "US-Net", TABLE, BETTER)]


def naturally_slimmable(results: Results) -> list[Finding]:
    widths = results.widths((V1, "US-Net"))
    between = [width for width in widths if width not in TABLE]
    fails = partial(
        compare, results=results, network=V1, other="US-Net", limit=FAILURE, at_least=True
    )
    sliced = "An ordinary network sliced and calibrated fails"
    return [
        fails(sliced, one="sliced I-Net 1.0", widths=widths[:-1]),
        fails("A slimmable network fails between its switches", one="S-Net", widths=between),
    ]


def search(results: Results) -> list[Finding]:
    """Both networks; a fixed set of configurations must do as well as all of them."""
    found = []
    for network, name in ((V1, "MobileNet v1"), (V2, "MobileNet v2")):
        for width, points in SEARCH_GAINS.items():
            claim = f"{name}: searched channels are {points} points better than width {width}"
            found.append(compare(claim, results, network, "searched", "uniform", [width], -points))
        claim = f"{name}: training with 512 configurations is as good as with all"
        widths = list(SEARCH_GAINS)
        found.append(compare(claim, results, network, "searched, 512", "searched", widths, SAME))
    return found


def nonuniform(results: Results) -> list[Finding]:
    """Stages are compared at the same multiply-adds, as in the paper's figure."""
    stages = [f"stage {number}" for number in range(1, 6)]
    uniform = results.seeds((V1, "uniform"))
    cost = {
        stage: {
            seed: excess_error(spectrum, uniform[seed])
            for seed, spectrum in results.seeds((V1, stage)).items()
        }
        for stage in stages
    }
    seeds = list(uniform)

    def margin(better: str, others: Sequence[str], largest: bool) -> list[float]:
        pick = max if largest else min
        return [cost[better][seed] - pick(cost[other][seed] for other in others) for seed in seeds]

    means = {stage: statistics.mean(by_seed.values()) for stage, by_seed in cost.items()}
    listed = ", ".join(f"{stage} {mean:+.2f}" for stage, mean in means.items())
    worst = [-value for value in margin("stage 5", stages[:-1], largest=True)]
    best = margin("stage 1", stages[1:], largest=False)
    errors = [
        statistics.mean(point.metrics[ERROR] for one in by_seed.values() for point in one.points)
        for by_seed in (uniform, *(results.seeds((V1, stage)) for stage in stages))
    ]
    verdicts, remark = (judge(worst), judge(best)), ""
    if results.learned_nothing(errors):
        verdicts, remark = (Verdict.OPEN, Verdict.OPEN), GUESSING
    note = f"points over uniform widths at the same multiply-adds: {listed}"
    hurts_most = f"Narrowing stage 5 hurts most: {note} ({spell_margin(worst, None)}){remark}."
    hurts_least = (
        f"Narrowing stage 1 hurts least: its error is {spell(best)} that of the next best "
        f"({spell_margin(best, None)}){remark}."
    )
    claim = "Trained nonuniform, it is close at uniform widths"
    return [
        Finding(verdicts[0], hurts_most),
        Finding(verdicts[1], hurts_least),
        compare(claim, results, V1, "uniform", "trained uniform", TABLE, CLOSE),
    ]


def excess_error(spectrum: Spectrum, reference: Spectrum) -> float:
    """The mean distance of a spectrum above another at the same multiply-adds."""
    known = sorted((point.macs, point.metrics[ERROR]) for point in reference.points)
    costs, errors = zip(*known, strict=True)
    return statistics.mean(
        point.metrics[ERROR] - float(np.interp(point.macs, costs, errors))
        for point in spectrum.points
        if costs[0] <= point.macs <= costs[-1]
    )


def super_resolution(results: Results) -> list[Finding]:
    names = [label for _, label in results.spectra if label.startswith("US-Net")]
    untaught = "US-Net, no distillation"
    gains = partial(compare, results=results, network="wdsr", at_least=True)
    close = "It is close to an individual network, in the paper 0.01 dB below"
    helps = "Inplace distillation helps slightly"
    return [
        *(
            gains(close, one=name, other="I-Net", widths=[width], limit=-CLOSE_PSNR, noise=0.0)
            for name in names
            for width in (0.5, 1.0)
        ),
        *(
            gains(helps, one=name, other=untaught, widths=results.widths(("wdsr", name)))
            for name in names
            if name != untaught
        ),
    ]


def reinforcement(results: Results) -> list[Finding]:
    claim = "One network for all widths scores higher than an individual one"
    higher = partial(compare, claim, results, "atari_cnn", "US-Net", "I-Net", at_least=True)
    return [higher(widths=[width], limit=HIGHER_SCORE) for width in TABLE]
