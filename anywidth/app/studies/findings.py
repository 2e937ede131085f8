"""Which of the paper's findings hold, study by study."""

from __future__ import annotations

import statistics
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
from anywidth.app.studies.study_parts import MOBILENET_V1, MOBILENET_V2
from anywidth.measuring.spectra import Spectrum

ERROR = "top1_error"
V1 = MOBILENET_V1.name
TABLE = MOBILENET_V1.widths
# The label of a US-Net whose narrower widths together weigh as much as the widest.
BALANCED = "US-Net, balanced"
# As above, and the labels of narrow widths are half true. Only MobileNet v2 is trained this way.
HALF_TRUE = f"{BALANCED}, half true labels"

# Nonuniform configurations that come again: with the widest and the narrowest no more than the
# graphs that a training keeps.
DRAWN = 500

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
    for network in (MOBILENET_V1, MOBILENET_V2):
        claim, widths = f"US-{network.title} is", network.widths
        us = partial(compare, results=results, network=network.name, one="US-Net")
        alone = partial(us, other="I-Net")
        found += [
            alone(f"{claim} on average no worse than individual networks", widths=widths),
            alone(f"{claim} better at the narrowest width", widths=widths[:1], limit=BETTER),
            alone(f"{claim} close at full width", widths=widths[-1:], limit=CLOSE),
            us(f"{claim} on average no worse than four switches", other="S-Net", widths=widths),
        ]
    return found


def balanced_losses(results: Results) -> list[Finding]:
    """What we ask of balanced losses, which the paper does not have."""
    found = []
    for network, label, how, other, others in (
        (MOBILENET_V1, BALANCED, "Balanced", "US-Net", "the paper's sum"),
        (MOBILENET_V2, BALANCED, "Balanced", "US-Net", "the paper's sum"),
        (MOBILENET_V2, HALF_TRUE, "With half true labels", BALANCED, "balanced losses alone"),
    ):
        balanced = partial(compare, results=results, network=network.name, one=label)
        better = partial(balanced, widths=network.widths, limit=BETTER)
        claim = f"{how}, {network.title} is"
        found += [
            *(
                balanced(f"{claim} no worse than alone at {width}", other="I-Net", widths=[width])
                for width in network.widths
            ),
            better(f"{claim} on average better than four switches", other="S-Net"),
            better(f"{claim} on average better than {others}", other=other),
        ]
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
    errors = [
        error
        for line in results.spectra
        for error in results.means(line, results.widths(line)).values()
    ]
    guessing = results.learned_nothing(errors)
    found = []
    for claim, from_all in (
        ("A width between those that were drawn can fail", False),
        ("If all widths are drawn, none fails", True),
    ):
        peaks = {
            label: max(map(_highest_peak, by_seed.values()))
            for (_, label), by_seed in results.spectra.items()
            if label.endswith("all") == from_all
        }
        label, (height, width) = max(peaks.items(), key=lambda peak: peak[1])
        holds = (height < FAILURE) == from_all
        text = f"{claim}: {label} at {format_width(width)} is {height:.2f} points above both its "
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
    for network in (MOBILENET_V1, MOBILENET_V2):
        name, title = network.name, network.title
        for width, points in SEARCH_GAINS.items():
            claim = f"{title}: searched channels are {points} points better than width {width}"
            found.append(compare(claim, results, name, "searched", "uniform", [width], -points))
        claim = f"{title}: training with {DRAWN} configurations is as good as with all"
        widths = list(SEARCH_GAINS)
        found.append(compare(claim, results, name, f"searched, {DRAWN}", "searched", widths, SAME))
    return found


def nonuniform(results: Results) -> list[Finding]:
    """Stages are compared at the same multiply-adds, as in the paper's figure."""
    uniform = results.seeds((V1, "uniform"))
    stages = {f"stage {i}": results.seeds((V1, f"stage {i}")) for i in range(1, 6)}
    costs = {
        stage: [excess_error(by_seed[seed], one) for seed, one in uniform.items()]
        for stage, by_seed in stages.items()
    }
    listed = ", ".join(f"{stage} {statistics.mean(cost):+.2f}" for stage, cost in costs.items())
    of_seeds = list(zip(*costs.values(), strict=True))
    worst = [max(others) - last for *others, last in of_seeds]
    best = [first - min(others) for first, *others in of_seeds]
    errors = [
        statistics.mean(point.metrics[ERROR] for one in by_seed.values() for point in one.points)
        for by_seed in (uniform, *stages.values())
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
