"""Plots: the same bytes every time, everything in the frame, no label on another."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from anywidth.app.showing.curves import curves_figure, curves_panels, has_curves
from anywidth.app.showing.figure_style import figure_bytes, style
from anywidth.app.showing.plots import latency_figure, plot_spectra, series_colors, spectra_figure
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.measuring.width_lists import parse_widths
from anywidth.width import ChannelConfig


def sample(name: str, kind: str, widths: list[float], rise: float, scale: int = 1) -> Spectrum:
    """Error that falls with the width by `rise` in all; costs that grow with its square."""
    return Spectrum(
        name,
        tuple(
            SpectrumPoint(
                width,
                ChannelConfig(()),
                int(568_000_000 * scale * width**2),
                1000,
                {"top1_error": 7.0 + rise * (1 - width), "loss": 1.0},
            )
            for width in widths
        ),
        kind,
        TrainedClassifier.metrics,
    )


US = sample("US-Net", "us", parse_widths("0.25:1.0:0.025"), 4.0)
S = sample("S-Net", "s", [0.25, 0.5, 0.75, 1.0], 5.0)
I_NETS = [sample("I-Net", "i", [width], 6.0) for width in (0.25, 0.5, 1.0)]
CONTROL = sample("sliced", "control", [0.25, 0.5, 1.0], 100.0)


def drawn(spectra: list[Spectrum], metric: str | None = None) -> Figure:
    with style():
        return spectra_figure(spectra, metric)


def legend_texts(figure: Figure) -> list[str]:
    legend = figure.axes[0].get_legend() or figure.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def top_labels(figure: Figure) -> list[str]:
    top = figure.axes[0].child_axes[0]
    return [text.get_text() for text in top.get_xticklabels()]


def test_each_kind_has_its_own_marks() -> None:
    lines = drawn([US, S, *I_NETS, CONTROL]).axes[0].get_lines()
    looks = [(line.get_marker(), line.get_linestyle(), len(line.get_xdata())) for line in lines]
    assert looks == [("o", "-", 31), ("s", "None", 4), ("D", "None", 3), ("x", ":", 3)]
    assert len({to_hex(line.get_color()) for line in lines}) == 4


def test_two_networks_of_one_kind_differ_in_colour() -> None:
    second = sample("US-Net, longer", "us", [0.25, 1.0], 3.0)
    first, other = drawn([US, second]).axes[0].get_lines()
    assert first.get_color() != other.get_color()


def test_networks_of_several_kinds_differ_in_colour() -> None:
    assert len(set(series_colors(["us", "us", "us", "s", "i"]))) == 5
    colors = series_colors(["us", "us", "s", "i"])
    assert len(set(colors)) == 4
    assert [colors[0], colors[2], colors[3]] == series_colors(["us", "s", "i"])


def test_points_lie_at_millions_of_multiply_adds_in_order() -> None:
    backwards = sample("US-Net", "us", [1.0, 0.5, 0.25], 4.0)
    axes = drawn([backwards]).axes[0]
    line = axes.get_lines()[0]
    assert list(line.get_xdata()) == [35.5, 142.0, 568.0]
    assert list(line.get_ydata()) == [10.0, 9.0, 7.0]
    assert axes.get_xlabel() == "multiply-adds, M"
    assert axes.get_ylabel() == "top-1 error, %"
    assert drawn([sample("x", "us", [0.5, 1.0], 1.0, 100)]).axes[0].get_xlabel().endswith(", G")


def test_everything_is_in_the_frame_but_a_control_that_would_flatten_it() -> None:
    mild = sample("sliced", "control", [0.25, 1.0], 8.0)
    low, high = drawn([US, mild]).axes[0].get_ylim()
    assert low < 7.0
    assert high > 13.0
    figure = drawn([US, *I_NETS, CONTROL])
    low, high = figure.axes[0].get_ylim()
    assert low < 7.0
    assert 11.5 < high < 16
    assert legend_texts(figure) == ["US-Net", "I-Net", "sliced (beyond the frame, to 82.00)"]
    # Below the frame, where no line can pass behind it.
    assert figure.axes[0].get_legend() is None


def test_a_legend_stays_clear_of_error_bars() -> None:
    points = [
        replace(one, metrics={"score": 10.0, "score_standard_error": 4.0}) for one in S.points
    ]
    figure = drawn([Spectrum("US-PPO", tuple(points))])
    assert legend_texts(figure) == ["US-PPO"]
    assert figure.axes[0].get_legend() is None


@pytest.mark.parametrize("length", [5, 40, 80, 300])
@pytest.mark.parametrize("with_errors", [False, True])
def test_a_legend_lies_inside_the_figure(length: int, with_errors: bool) -> None:
    names = [f"runs/{letter * length}" for letter in "abc"]
    metrics = {"score": 10.0} | ({"score_standard_error": 4.0} if with_errors else {})
    points = tuple(replace(one, metrics=metrics) for one in S.points)
    spectra = [Spectrum(name, points) for name in names]
    figure = drawn(spectra)
    figure.draw_without_rendering()
    legend = figure.axes[0].get_legend() or figure.legends[0]
    extent = legend.get_window_extent()
    assert figure.bbox.x0 <= extent.x0
    assert extent.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= extent.y0
    assert extent.y1 <= figure.bbox.y1
    assert [text.replace("\n", "") for text in legend_texts(figure)] == names
    # What is left for the axes is as much as ever.
    assert figure.axes[0].get_window_extent().height > 0.6 * 4.4 * figure.dpi


def test_nearly_flat_metrics_are_labelled_in_full() -> None:
    points = [
        replace(p, metrics={"psnr": 24.14 + i / 1e5}) for i, p in enumerate(US.points, start=1)
    ]
    figure = drawn([Spectrum("US-WDSR", tuple(points))])
    figure.canvas.draw()
    axis = figure.axes[0].yaxis
    assert axis.get_offset_text().get_text() == ""
    assert axis.get_ticklabels()[1].get_text().startswith("24.")


def noisy(values: list[float], error: float) -> Spectrum:
    points = [
        replace(p, metrics={"top1_error": value, "top1_error_standard_error": error})
        for p, value in zip(S.points, values, strict=True)
    ]
    return Spectrum("US-Net", tuple(points), described=TrainedClassifier.metrics)


def test_an_axis_does_not_zoom_into_noise() -> None:
    values = [15.0, 14.6, 14.8, 14.2]
    low, high = drawn([noisy(values, 0.8)]).axes[0].get_ylim()
    assert high - low == pytest.approx(8.0)
    assert low < 14.2 - 0.8
    assert high > 15.0 + 0.8
    # With many more images, the same differences are no longer noise.
    low, high = drawn([noisy(values, 0.1)]).axes[0].get_ylim()
    assert high - low < 1.5


def test_bars_are_standard_errors_and_the_axis_says_so() -> None:
    axes = drawn([noisy([20.0, 18.0, 16.0, 15.0], 0.8)]).axes[0]
    (bars,) = [one for one in axes.collections if isinstance(one, LineCollection)]
    ends = [(one[0][1], one[1][1]) for one in bars.get_segments()]
    assert ends[0] == pytest.approx((19.2, 20.8))
    assert "standard error" in axes.get_ylabel()


def test_a_title_names_a_single_network_and_is_never_cut() -> None:
    with style():
        figure = spectra_figure([US], title="US-Net, 10,000 test images of " + "long " * 20)
        figure.draw_without_rendering()
    assert figure.axes[0].get_legend() is None
    assert not figure.legends
    extent = figure.axes[0]._left_title.get_window_extent()
    assert extent.x1 <= figure.bbox.x1


def test_latency_is_drawn_from_zero_with_its_spread_and_conditions() -> None:
    points = [
        replace(p, latency_ms=3 * p.width, latency_range=(2.9 * p.width, 4 * p.width))
        for p in US.points
    ]
    timed = replace(
        US, points=tuple(points), latency_by="onnxruntime", latency_on="a CPU, 1 thread"
    )
    with style():
        axes = latency_figure(timed).axes[0]
    assert list(axes.get_lines()[0].get_xdata())[:2] == [0.25, 0.275]
    assert axes.get_lines()[0].get_ydata()[-1] == 3.0
    (bars,) = axes.collections
    assert [tuple(one[:, 1]) for one in bars.get_segments()][-1] == pytest.approx((2.9, 4.0))
    low, high = axes.get_ylim()
    assert low == 0
    assert high > 4.0
    for words in ("onnxruntime", "batch size 1", "a CPU, 1 thread"):
        assert words in axes.get_title(loc="left")


def test_a_control_that_is_better_somewhere_stays_in_the_frame_there() -> None:
    points = sample("sliced", "control", [0.25, 0.5, 1.0], 0.0).points
    errors = (90.0, 30.0, 5.5)
    changed = [replace(p, metrics={"top1_error": e}) for p, e in zip(points, errors, strict=True)]
    low, high = drawn([US, replace(CONTROL, points=tuple(changed))]).axes[0].get_ylim()
    assert low < 5.5
    assert high < 20


def test_widths_stand_along_the_top_where_all_agree_on_their_cost() -> None:
    labels = top_labels(drawn([US, S]))
    assert {"0.25", "0.5", "0.75", "1.0"} <= set(labels)
    assert len(labels) < 10
    assert set(top_labels(drawn([sample("a", "us", [0.3, 0.65, 1.0], 1.0)]))) == {
        "0.3",
        "0.65",
        "1.0",
    }
    other_network = sample("MobileNet v2", "us", [0.25, 1.0], 4.0, scale=2)
    assert drawn([US, other_network]).axes[0].child_axes == []


@pytest.mark.parametrize("axis", ["x", "top"])
def test_no_tick_label_touches_the_next(axis: str) -> None:
    with style():
        figure = spectra_figure([US, S, *I_NETS, CONTROL], title="CIFAR-10")
        figure_bytes(figure, "png")
    axes = figure.axes[0] if axis == "x" else figure.axes[0].child_axes[0]
    boxes = sorted(
        (label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()),
        key=lambda box: box.x0,
    )
    assert len(boxes) > 3
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_files_are_of_the_kind_their_name_says_and_always_the_same(tmp_path: Path) -> None:
    for form, mark in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        first, second = tmp_path / f"a.{form}", tmp_path / f"b.{form}"
        plot_spectra([US, S], first, title="one < two")
        plot_spectra([US, S], second, title="one < two")
        assert first.read_bytes().startswith(mark)
        assert first.read_bytes() == second.read_bytes()
    svg = (tmp_path / "a.svg").read_text()
    for text in ("one &lt; two", "US-Net", "S-Net", "top-1 error, %"):
        assert text in svg
    assert "matplotlib.org" not in svg


def test_the_users_matplotlib_settings_neither_matter_nor_change(tmp_path: Path) -> None:
    plot_spectra([US], tmp_path / "plain.png")
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red"}):
        plot_spectra([US], tmp_path / "set.png")
        assert matplotlib.rcParams["lines.linewidth"] == 9
    assert (tmp_path / "set.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_values_that_are_not_finite_are_left_out() -> None:
    points = (*S.points, SpectrumPoint(0.6, ChannelConfig(()), 5, 5, {"top1_error": math.nan}))
    line = drawn([Spectrum("S-Net", points, "s")]).axes[0].get_lines()[0]
    assert len(line.get_xdata()) == 4
    with pytest.raises(AnywidthError, match="finite"):
        drawn([Spectrum("S-Net", points[-1:], "s")])


@pytest.mark.parametrize("name", ["run$1$", "a$_$b^", "訓練", "обучение ∞", "\\alpha"])
def test_any_name_of_a_folder_can_be_drawn(name: str, tmp_path: Path) -> None:
    for suffix in ("png", "svg"):
        plot_spectra([replace(US, name=name), S], tmp_path / f"plot.{suffix}", title=name)
    assert (tmp_path / "plot.svg").read_text().count(name) == 2


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    with pytest.raises(AnywidthError, match=r"picture\.pdf"):
        plot_spectra([US], tmp_path / "picture.pdf")
    other = Spectrum("SR", (SpectrumPoint(1.0, ChannelConfig(()), 1, 1, {"psnr": 30.0}),))
    with pytest.raises(AnywidthError, match="'SR'"):
        plot_spectra([US, other], tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []


TITLES = TrainedClassifier.curves
ROWS: list[dict[str, float]] = [
    {
        "step": step,
        "epoch": step / 10,
        "learning_rate": 0.1,
        "loss/0.25": 3 / (step + 1),
        "loss/1.0": 2 / (step + 1),
        **({"accuracy/1.0": float(step), "accuracy/0.25": step / 2} if step % 10 == 0 else {}),
    }
    for step in range(40)
]


def test_curves_have_a_panel_a_quantity_and_a_line_a_width() -> None:
    with style():
        figure = curves_figure(ROWS, TITLES)
    loss, accuracy = figure.axes
    titles = [axes.get_title(loc="left") for axes in (loss, accuracy)]
    assert titles == ["loss", "accuracy on the batch, %"]
    assert [line.get_label() for line in loss.get_lines()] == ["1.0", "0.25"]
    assert list(loss.get_lines()[0].get_ydata()) == [2 / (step + 1) for step in range(40)]
    assert list(accuracy.get_lines()[1].get_ydata()) == [0.0, 5.0, 10.0, 15.0]
    assert list(accuracy.get_lines()[1].get_xdata()) == [0.0, 1.0, 2.0, 3.0]
    assert loss.get_xlabel() == "epoch"


def test_steps_are_whole_numbers_with_few_digits() -> None:
    for steps, expected in ((3, {"0", "1", "2"}), (40_000, {"0", "10 k", "20 k", "30 k", "40 k"})):
        rows = [{"step": step, "loss_max": 1.0} for step in (0, steps // 2, steps - 1)]
        with style():
            figure = curves_figure(rows, TITLES)
            figure.canvas.draw()
        ticks = {label.get_text() for label in figure.axes[0].get_xticklabels()}
        assert expected <= ticks | {"40 k"}
        assert not any("." in tick for tick in ticks)


def test_the_two_ends_of_a_run_and_steps_where_epochs_repeat() -> None:
    rows = [
        {
            "step": step,
            "epoch": 1 + step // 4,
            "loss_min": 3.0,
            "loss_max": 2.0,
            "accuracy_max": 1.0,
        }
        for step in range(8)
    ]
    rows[-1]["validation_error_min"] = 30.0
    with style():
        figure = curves_figure(rows, TITLES)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "loss",
        "accuracy on the batch, %",
        "validation error, %",
    ]
    loss = figure.axes[0]
    assert [line.get_label() for line in loss.get_lines()] == ["widest", "narrowest"]
    assert list(loss.get_lines()[0].get_ydata()) == [2.0] * 8
    assert loss.get_xlabel() == "step"


def test_long_curves_are_averaged_and_gaps_stay_gaps() -> None:
    rows = [{"step": step, "loss": float(step % 2)} for step in range(3000)]
    rows += [{"step": step, "loss": math.inf} for step in range(3000, 3010)]
    with style():
        axes = curves_figure(rows, TITLES).axes[0]
    values = list(axes.get_lines()[0].get_ydata())
    assert len(values) <= 300
    assert all(abs(value - 0.5) < 0.06 for value in values[:-2])
    assert math.isnan(values[-1])
    assert axes.get_xlabel() == "step"
    assert axes.get_legend() is None


def test_one_epoch_is_a_point_that_can_be_seen_over_the_whole_training() -> None:
    rows = [{"step": float(step), "loss_max": 1.0 / step, "loss_min": 1.0} for step in (20, 23)]
    rows[-1] |= {"validation_error_max": 90.0, "validation_error_min": 90.0}
    with style():
        loss, errors = curves_figure(rows, TITLES).axes
    first, second = errors.get_lines()
    assert first.get_markersize() > 6
    assert first.get_linestyle() == "None"
    # Equal values: the second is hollow, and the first is seen inside it.
    assert second.get_markerfacecolor() == "none"
    assert loss.get_xlim() == errors.get_xlim()
    assert loss.get_xlim()[0] <= 0
    assert loss.get_lines()[0].get_linestyle() == "-"


def test_panels_stand_below_each_other_or_alone() -> None:
    with style():
        whole, panels = curves_figure(ROWS, TITLES), curves_panels(ROWS, TITLES)
        whole.draw_without_rendering()
    upper, lower = (axes.get_window_extent() for axes in whole.axes)
    assert upper.y0 > lower.y1
    assert [len(one.axes) for one in panels] == [1, 1]


def test_learning_rates_are_no_curves() -> None:
    assert has_curves(ROWS, TITLES)
    assert not has_curves([{"step": 1, "learning_rate": 0.1}], TITLES)


def test_importing_plots_leaves_matplotlib_alone() -> None:
    code = "import sys, anywidth.app.showing.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
