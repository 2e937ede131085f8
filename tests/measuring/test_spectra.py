"""Spectra: every width evaluated as it should be, and files that give back what was written."""

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import anywidth as aw
from anywidth.app.showing.spectrum_tables import (
    comparison_table,
    format_count,
    format_mean,
    format_metric,
    spectrum_table,
)
from anywidth.app.tasks.classification.task import TrainedClassifier
from anywidth.app.tasks.reinforcement.task import TrainedPolicy
from anywidth.app.tasks.super_resolution.task import TrainedUpscaler
from anywidth.errors import AnywidthError
from anywidth.measuring.spectra import (
    Metric,
    Spectrum,
    SpectrumPoint,
    joined,
    spectrum,
    standard_error_of_share,
)
from anywidth.measuring.width_lists import parse_widths, spectrum_widths
from anywidth.width import ChannelConfig


def network() -> nn.Module:
    """Converted, with batch-norm statistics at 0.25 and at full width only."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)
    )
    aw.slimmable(model, example_input=torch.randn(2, 3, 8, 8), verified=False)
    for width in (1.0, 0.25):
        with aw.at_width(model, width):
            model.train()(torch.randn(4, 3, 8, 8))
    return model


def point(width: float | None, error: float, cost: int = 100) -> SpectrumPoint:
    return SpectrumPoint(width, ChannelConfig((("a", 8),)), cost, 10, {"top1_error": error})


def rendered(table: object, columns: int = 100) -> str:
    console = Console(width=columns, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_every_width_is_evaluated_narrow_in_eval_mode_and_without_gradients() -> None:
    model = network()
    images = torch.randn(4, 3, 8, 8)
    seen = []

    def evaluate(given: nn.Module) -> dict[str, float]:
        assert given is model
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        seen.append(model[0].out_channels)
        loss = model(images).square().mean()
        model.train()  # a careless evaluation must not spoil the next width
        return {"loss": loss, "channels": model[0].out_channels}

    model.train()
    result = spectrum(model, evaluate, [1.0, 0.25], name="US-Net", progress=False)
    assert seen == [32, 8]
    assert [p.metrics["channels"] for p in result.points] == [32.0, 8.0]
    assert all(type(value) is float for p in result.points for value in p.metrics.values())
    for one, width in zip(result.points, [1.0, 0.25], strict=True):
        assert one.width == width
        assert one.channels == aw.plan_of(model).resolve(width)
        assert one.macs == aw.macs(model, width)
        assert one.parameters == aw.parameter_count(model, width)
        assert one.latency_ms is None
    with torch.no_grad(), aw.at_width(model.eval(), 0.25):
        assert result.at(0.25).metrics["loss"] == model(images).square().mean().item()


def test_the_network_is_left_as_it_was_even_after_a_failure() -> None:
    model = network()
    model.train()
    model[1].eval()
    aw.set_width(model, 0.5)

    def fails(given: nn.Module) -> dict[str, float]:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="data"):
        spectrum(model, fails, [0.25], progress=False)
    assert model[0].out_channels == 16
    assert model.training
    assert not model[1].training


@pytest.mark.parametrize(
    ("low", "high", "step", "expected"),
    [
        (0.25, 0.35, 0.025, [0.25, 0.275, 0.3, 0.325, 0.35]),
        (0.26, 0.3, 0.025, [0.26, 0.285, 0.3]),
        (0.5, 0.62, 0.05, [0.5, 0.55, 0.6, 0.62]),
        (0.5, 0.51, 0.05, [0.5, 0.51]),
        (1.0, 1.0, 0.025, [1.0]),
    ],
)
def test_steps_end_at_the_widest_width(
    low: float, high: float, step: float, expected: list[float]
) -> None:
    assert spectrum_widths(low, high, step) == expected


def test_missing_statistics_are_found_before_anything_is_evaluated() -> None:
    model = network()
    calls = []

    def evaluate(given: nn.Module) -> dict[str, float]:
        calls.append(1)
        return {"loss": 0.0}

    with pytest.raises(AnywidthError, match=r"0\.5"):
        spectrum(model, evaluate, [1.0, 0.25, 0.5], progress=False)
    assert calls == []
    with pytest.raises(AnywidthError, match="range"):
        spectrum(model, evaluate, [1.0, 0.1], progress=False)
    assert calls == []


def test_widths_of_equal_channels_are_one_evaluation_and_configurations_have_no_width() -> None:
    model = network()
    calls = []

    def evaluate(given: nn.Module) -> dict[str, float]:
        calls.append(aw.plan_of(model))
        return {"loss": float(len(calls))}

    config = aw.plan_of(model).resolve(0.25)
    result = spectrum(model, evaluate, [0.25, 0.26, config, 1.0], progress=False)
    assert [p.metrics["loss"] for p in result.points] == [2, 2, 2, 1]  # the widest first
    assert [p.width for p in result.points] == [0.25, 0.26, None, 1.0]
    assert result.at(config) is result.points[0]


def test_latency_and_progress_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    result = spectrum(network(), lambda m: {"loss": 1.0}, [0.25, 1.0], measure_latency=True)
    assert all(p.latency_ms is not None and p.latency_ms > 0 for p in result.points)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert "timing widths" in shown.err
    assert result.latency_by == "onnxruntime"
    assert "1 thread" in (result.latency_on or "")
    for point in result.points:
        fastest, median = point.latency_range or (0.0, 0.0)
        assert 0 < fastest <= (point.latency_ms or 0.0) <= median
    assert shown.out == ""
    spectrum(network(), lambda m: {"loss": 1.0}, [0.25], progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("returned", "message"),
    [(8.1, "float"), ({"error": "low"}, "numbers"), (None, "NoneType")],
)
def test_what_evaluate_returns_is_checked(returned: object, message: str) -> None:
    with pytest.raises(AnywidthError, match=message):
        spectrum(network(), lambda m: returned, [1.0], progress=False)  # type: ignore[arg-type, return-value]


def test_bad_calls_are_named() -> None:
    with pytest.raises(AnywidthError, match="one width"):
        spectrum(network(), lambda m: {}, [])
    with pytest.raises(AnywidthError, match=r"\[0.5\]"):
        spectrum(network(), lambda m: {}, 0.5)  # type: ignore[arg-type]
    with pytest.raises(AnywidthError, match="evaluate"):
        spectrum(network(), None, [1.0])  # type: ignore[arg-type]
    with pytest.raises(AnywidthError, match="converted"):
        spectrum(nn.Linear(2, 2), lambda m: {}, [1.0])
    with pytest.raises(AnywidthError, match="'best'"):
        Spectrum("x", (), "best")


def test_json_gives_back_everything() -> None:
    model = network()
    config = aw.plan_of(model).resolve(0.25)
    result = spectrum(
        model, lambda m: {"psnr": 0.1 + 0.2, "x": 3}, [1.0, config], name="é", kind="s"
    )
    timed = tuple(replace(p, latency_ms=2.0, latency_range=(1.0, 3.0)) for p in result.points)
    result = replace(
        result, points=timed, latency_by="PyTorch", latency_on="a CPU", measured_on="9 images"
    )
    again = Spectrum.from_json(json.loads(json.dumps(result.to_json())))
    assert again == result
    assert again.title == "é, 9 images"
    assert again.points[1].channels == config


@pytest.mark.parametrize("key", ["points", "name", "kind"])
def test_a_damaged_json_spectrum_is_refused(key: str) -> None:
    data = Spectrum("a", (point(0.5, 1.0),)).to_json()
    with pytest.raises(AnywidthError, match="damaged"):
        Spectrum.from_json({name: value for name, value in data.items() if name != key})
    with pytest.raises(AnywidthError, match="9"):
        Spectrum.from_json({**data, "version": 9})


def test_csv_has_a_row_a_width(tmp_path: Path) -> None:
    path = tmp_path / "us_net.csv"
    points = (
        SpectrumPoint(0.3, ChannelConfig(()), 5, 7, {"top1_error": 0.1 + 0.2, "loss": 1e-9}, 1.5),
        SpectrumPoint(None, ChannelConfig(()), 6, 8, {"top1_error": 3.0}),
    )
    Spectrum("us_net", points).to_csv(path)
    assert path.read_text().splitlines() == [
        "width,macs,parameters,top1_error,loss,latency_ms",
        f"0.3,5,7,{0.1 + 0.2!r},1e-09,1.5",
        ",6,8,3.0,,",
    ]


def test_the_standard_error_of_a_share_is_binomial_and_never_nothing() -> None:
    assert standard_error_of_share(15.0, 2000) == pytest.approx(0.8, abs=0.005)
    assert standard_error_of_share(50.0, 10_000) == pytest.approx(0.5, abs=1e-4)
    assert 0 < standard_error_of_share(0.0, 10_000) < 0.02


def test_best_knows_which_way_is_up() -> None:
    errors = Spectrum("a", (point(0.25, 9.0), point(0.5, 7.0, 300), point(1.0, 7.0, 200)))
    assert errors.best().width == 1.0
    rising = [SpectrumPoint(w, ChannelConfig(()), 1, 1, {"psnr": 30 + w}) for w in (0.5, 1.0)]
    assert Spectrum("b", tuple(rising)).best("psnr").width == 1.0
    with pytest.raises(AnywidthError, match="'psnr'"):
        errors.best("psnr")
    with pytest.raises(AnywidthError, match="NaN"):
        Spectrum("c", (point(1.0, math.nan),)).best()
    with pytest.raises(AnywidthError, match=r"0\.7"):
        errors.at(0.7)


def test_the_papers_31_widths_are_exact_decimals() -> None:
    widths = parse_widths("0.25:1.0:0.025")
    assert len(widths) == 31
    assert [str(width) for width in widths[:4]] == ["0.25", "0.275", "0.3", "0.325"]
    assert widths[-1] == 1.0
    assert parse_widths("0.25, 0.5,1.0,0.5") == [0.25, 0.5, 1.0]
    assert parse_widths("0.3") == [0.3]
    assert parse_widths("0.25:0.45:0.1,1") == [0.25, 0.35, 0.45, 1.0]
    assert parse_widths("0.25:1.0:0.5") == [0.25, 0.75]


@given(st.integers(1, 400), st.integers(0, 600), st.integers(1, 200))
def test_a_range_never_drifts(start: int, length: int, step: int) -> None:
    stop = start + length
    text = f"{Decimal(start) / 1000}:{Decimal(stop) / 1000}:{Decimal(step) / 1000}"
    assert parse_widths(text) == [n / 1000 for n in range(start, stop + 1, step)]


@pytest.mark.parametrize(
    "text",
    ["", "half", "0.25:1.0", "0.25:1.0:0", "1.0:0.25:0.1", "0.25:nan:0.1", "0.5,,1", "1:2:3:4",
     "0:1:1e-99999", "0.25:inf:0.1", "0:1:1e-9"],
)  # fmt: skip
def test_bad_widths_are_quoted_with_examples(text: str) -> None:
    with pytest.raises(AnywidthError) as caught:
        parse_widths(text)
    assert repr(text) in str(caught.value)
    assert "0.25:1.0:0.025" in str(caught.value)


@pytest.mark.parametrize("text", ["0", "1.5", "nan", "-0.5", "0.5:1.5:0.5"])
def test_widths_outside_the_possible_are_refused(text: str) -> None:
    with pytest.raises(AnywidthError, match=r"\(0, 1\]"):
        parse_widths(text)


def test_spectra_of_one_name_and_kind_are_one_series() -> None:
    parts = [Spectrum("I-Net", (point(w, 9.0),), "i") for w in (0.25, 0.5)]
    other = Spectrum("I-Net", (point(1.0, 8.0),), "control")
    series = joined([parts[0], other, parts[1]])
    assert [(one.kind, [p.width for p in one.points]) for one in series] == [
        ("i", [0.25, 0.5]),
        ("control", [1.0]),
    ]


def test_the_tables_show_every_width() -> None:
    points = (point(0.25, 9.5, 41_000_000), point(1.0, 7.25, 568_740_352))
    ours = Spectrum("US-Net", points, described=TrainedClassifier.metrics)
    text = rendered(spectrum_table(ours))
    assert "568.7 M" in text
    assert "top-1 error" in text
    assert "latency" not in text
    seeds = [Spectrum("I-Net", (point(0.25, error),), "i") for error in (10.0, 12.0)]
    lines = rendered(comparison_table([ours, *seeds])).splitlines()
    narrow = next(line for line in lines if line.strip().startswith("0.25"))
    wide = next(line for line in lines if line.strip().startswith("1.0"))
    assert narrow.split() == ["0.25", "9.50", "11.00", "±", "1.41"]
    assert wide.split() == ["1.0", "7.25", "-"]


def of_sets(count: int) -> Spectrum:
    """As super-resolution gives them: means, then a set's own."""
    metrics = {"psnr": 34.16, "ssim": 0.9234}
    for number in range(count):
        metrics |= {f"psnr_Set{number}": 33.0 + number, f"ssim_Set{number}": 0.9}
    points = [
        SpectrumPoint(w, ChannelConfig(()), 5_500_000_000, 10, metrics, 1.5) for w in (0.5, 1)
    ]
    return Spectrum("US-WDSR", tuple(points), described=TrainedUpscaler.metrics)


def test_a_narrow_terminal_leaves_columns_out_and_names_them() -> None:
    lines = rendered(spectrum_table(of_sets(3)), 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    row = next(line for line in lines if line.split()[:1] == ["0.5"])
    assert row.split() == ["0.5", "5.5", "G", "10", "34.16", "0.9234", "33.00", "0.9000", "1.50"]
    said = " ".join(" ".join(lines).split())
    for name in ("PSNR, dB, Set1", "SSIM, Set1", "PSNR, dB, Set2", "SSIM, Set2"):
        assert name in said.partition("No room for:")[2]
    assert "spectrum.csv has all columns" in said
    wide = rendered(spectrum_table(of_sets(3)), 120)
    assert "No room" not in wide
    assert "35.00" in wide
    narrow = rendered(spectrum_table(of_sets(3)), 30)
    assert "34.16" in narrow


@pytest.mark.parametrize("columns", range(40, 121, 8))
def test_no_number_is_ever_cut_or_broken(columns: int) -> None:
    metrics = {"score": 0.34, "score_standard_error": 0.0886}
    metrics |= {f"greedy_{name}": value for name, value in metrics.items()}
    played = SpectrumPoint(0.25, ChannelConfig(()), 343_800_000, 10, metrics, 1.5)
    runs = [Spectrum(f"US-net[b]{i}", (point(0.25, e),)) for i in range(7) for e in (9.0, 12.0)]
    policy = Spectrum("[b]US", (played,), described=TrainedPolicy.metrics)
    scores = rendered(spectrum_table(policy), columns)
    compared = rendered(comparison_table(runs), columns)
    for text in (scores, compared):
        assert "…" not in text
        assert text.count("±") == len(re.findall(r"\d ± \d", text))
    assert "[b]US" in scores
    assert "0.34 ± 0.09" in scores
    assert compared.count("10.50 ± 2.12") == 7
    for number in range(7):
        assert f"net[b]{number}" in compared


def test_a_deviation_has_the_decimals_of_its_mean() -> None:
    assert format_mean([8.1, 8.2]) == "8.15 ± 0.07"
    assert format_mean([0.25, 0.5]) == "0.3750 ± 0.1768"
    assert format_mean([8.1]) == "8.10"
    assert format_mean([8.1, float("inf")]) == "inf"
    assert format_mean([float("inf"), float("nan")]) == "-"
    assert format_mean([0.25, 0.5], Metric("score", 2)) == "0.38 ± 0.18"


def test_a_metric_has_the_same_decimals_at_every_size() -> None:
    classes = Spectrum("a", (), described=TrainedClassifier.metrics)
    pictures = Spectrum("b", (), described=TrainedUpscaler.metrics)
    for of, name, values, shown in (
        (classes, "top5_error", (0.6, 29.3), ["0.60", "29.30"]),
        (pictures, "ssim_Set5", (0.9, 1.0), ["0.9000", "1.0000"]),
        (classes, "loss", (0.31, 2.3), ["0.3100", "2.3000"]),
        (classes, "my_share", (0.31, 2.3), ["0.3100", "2.30"]),
    ):
        assert [format_metric(value, of.describe(name)) for value in values] == shown
    assert format_mean([]) == "-"


def test_counts_carry_their_unit() -> None:
    counts = (12, 1_500, 4_233_000, 4.1e9)
    assert [format_count(n) for n in counts] == ["12", "1.5 k", "4.2 M", "4.1 G"]


def test_importing_spectra_needs_torch_alone() -> None:
    code = (
        "import sys, anywidth.measuring.spectra\n"
        "heavy = {'rich', 'matplotlib', 'safetensors', 'torchvision', 'typer'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
