"""Compare the errors of settings seed by seed, and put the result into words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from anywidth.app.showing.spectrum_tables import format_width
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import (
    STANDARD_ERROR,
    Metric,
    Spectrum,
    SpectrumPoint,
    standard_error,
)

# A network has learned nothing if its error is not further below guessing, in points.
NEAR_CHANCE = 1.0

# A difference in PSNR that one seed cannot tell from luck, in dB.
CLOSE_PSNR = 0.05

# A verdict must be 95 % certain: quantiles of Student's t by degrees of freedom (seeds less one),
# and of the normal distribution.
_STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
_NORMAL = 1.645

GUESSING = "; none of them is better than guessing: train longer"

# (network, label of the setting)
Line = tuple[str, str]


@dataclass(frozen=True)
class Words:
    """How differences in a metric are put into words."""

    noun: str
    unit: str  # with a space before it
    decimals: int
    noise: str  # where the uncertainty of one seed comes from


ERROR = Words("error", " points", 2, "by the number of test images")
_WORDS = {
    "top1_error": ERROR,
    "psnr": Words("PSNR", " dB", 4, "assumed"),
    "score": Words("score", "", 1, "by the number of games"),
}


@dataclass(frozen=True)
class Results:
    """The measurements of a study, and the paper's numbers for the same settings.

    `described` is how each metric is shown; the first is compared. The numbers of classes and of
    images that errors were measured with are None if not known.
    """

    spectra: Mapping[Line, Mapping[int, Spectrum]]  # by seed
    paper: Mapping[Line, Mapping[float, float]]  # top-1 errors by width, where it has them
    classes: int | None = None
    test_images: int | None = None
    described: Mapping[str, Metric] = field(default_factory=lambda: TrainedClassifier.metrics)

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        return next(iter(self.described))

    def describe(self, metric: str) -> Metric:
        """How a metric is shown, also one of a single picture set."""
        return Spectrum("", (), described=self.described).describe(metric)

    def seeds(self, line: Line) -> Mapping[int, Spectrum]:
        if line not in self.spectra:
            raise AnywidthError(f"no results for {line}: expected one of {list(self.spectra)}")
        return self.spectra[line]

    def widths(self, line: Line) -> list[float]:
        """The widths that every seed has."""
        spectra = self.seeds(line).values()
        found = [{p.width for p in one.points if p.width is not None} for one in spectra]
        return sorted(set.intersection(*found))

    def points(self, line: Line, width: float) -> list[SpectrumPoint]:
        """What every seed that has a width measured there."""
        spectra = self.seeds(line).values()
        return [point for one in spectra for point in one.points if point.is_at(width)]

    def means(
        self, line: Line, widths: Sequence[float], metric: str | None = None
    ) -> dict[int, float]:
        """Per seed, the mean over some widths of a metric (the one that is compared)."""
        name = metric or self.metric
        return {
            seed: statistics.mean(one.at(width).metrics[name] for width in widths)
            for seed, one in self.seeds(line).items()
        }

    def learned_nothing(self, errors: Sequence[float]) -> bool:
        """Whether no error is better than guessing, so that their order means nothing."""
        if self.classes is None:
            return False
        guessing = 100 * (1 - 1 / self.classes)
        return min(errors) >= guessing - NEAR_CHANCE

    def noise(self, lines: Sequence[Line], widths: Sequence[float]) -> float:
        """The margin of the difference of two lines with one seed, see `margin`; 0 if not known."""
        if self.metric == "psnr":
            return CLOSE_PSNR
        points = [
            one.at(width) for line in lines for one in self.seeds(line).values() for width in widths
        ]
        if any(self.metric + STANDARD_ERROR in point.metrics for point in points):
            errors = [standard_error(point, self.metric) for point in points]
            return _NORMAL * math.hypot(*errors) / len(widths)
        if self.test_images is None:
            return 0.0
        means = [statistics.mean(self.means(line, widths).values()) for line in lines]
        return _NORMAL * math.sqrt(sum(mean * (100 - mean) / self.test_images for mean in means))

    def paper_error(self, line: Line, widths: Sequence[float]) -> float | None:
        """The paper's mean error over some widths, if it printed all of them."""
        printed = self.paper.get(line, {})
        is_printed = widths and printed.keys() >= set(widths)
        return statistics.mean(printed[width] for width in widths) if is_printed else None


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "too close to call"


@dataclass(frozen=True)
class Finding:
    """A finding of the paper, and whether it holds in our numbers."""

    verdict: Verdict
    text: str

    def __str__(self) -> str:
        return f"**{self.verdict[0].upper()}{self.verdict[1:]}.** {self.text}"


def margin(values: Sequence[float], noise: float = 0.0) -> float:
    """How far the mean of the seeds may be from the truth, with 95 % certainty to either side.

    That is Student's t times the standard error of the mean; with one seed it is `noise`.
    """
    seeds = len(values)
    if seeds == 1:
        return noise
    quantile = _STUDENT[min(seeds - 1, len(_STUDENT)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(seeds)


def judge(values: Sequence[float], limit: float = 0.0, noise: float = 0.0) -> Verdict:
    """Whether the mean of the seeds is at most `limit`; too close to call within the margin."""
    mean = statistics.mean(values)
    if abs(mean - limit) < margin(values, noise):
        return Verdict.OPEN
    return Verdict.HOLDS if mean <= limit else Verdict.FAILS


def compare(
    claim: str,
    results: Results,
    network: str,
    one: str,
    other: str,
    widths: Sequence[float],
    limit: float = 0.0,
    at_least: bool = False,
    noise: float | None = None,
) -> Finding:
    """Compare the metric of two settings of a network, in the mean over some widths.

    The claim holds if the first exceeds the second by at most `limit`, or if `at_least`, by at
    least that. `noise` is the margin with one seed; 0 if both measure the same trained network.
    """
    lines = (network, one), (network, other)
    ours, theirs = (results.means(line, widths) for line in lines)
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    sign = -1 if at_least else 1
    means = [statistics.mean(ours.values()), statistics.mean(theirs.values())]
    noise = results.noise(lines, widths) if noise is None else noise
    verdict = judge([sign * value for value in differences], sign * limit, noise)
    remark = ""
    if results.learned_nothing(means):
        verdict, remark = Verdict.OPEN, GUESSING
    printed = [results.paper_error(line, widths) for line in lines]
    paper = None
    if printed[0] is not None and printed[1] is not None:
        paper = printed[0] - printed[1]
    words = _WORDS[results.metric]
    text = f"{claim}: the {words.noun} of {one} is {spell(differences, words)} that of {other}"
    where = f"{spell_widths(widths)} ({spell_margin(differences, paper, noise, words)})"
    return Finding(verdict, f"{text}, {where}{remark}.")


def spell(values: Sequence[float], words: Words = ERROR) -> str:
    """A mean difference in words: `0.31 points below`."""
    mean = statistics.mean(values)
    if abs(mean) < 0.5 * 10**-words.decimals:
        return "equal to"
    return f"{abs(mean):.{words.decimals}f}{words.unit} {'below' if mean < 0 else 'above'}"


def spell_margin(
    values: Sequence[float], paper: float | None, noise: float = 0.0, words: Words = ERROR
) -> str:
    """The margin of the mean, and the paper's difference if it printed one."""
    shown = f"± {margin(values, noise):.{words.decimals}f}"
    spread = f"one seed, {shown} {words.noise}" if noise else "one seed"
    if len(values) > 1:
        spread = f"{shown}, {len(values)} seeds"
    if paper is None:
        return spread
    theirs = spell([paper]).replace(" points", "").replace("equal to", "no difference")
    return f"{spread}; paper: {theirs}"


def spell_widths(widths: Sequence[float]) -> str:
    names = [format_width(width) for width in widths]
    if len(names) == 1:
        return f"at width {names[0]}"
    if len(names) <= 5:
        return f"mean over widths {', '.join(names[:-1])} and {names[-1]}"
    return f"mean over {len(names)} widths from {names[0]} to {names[-1]}"
