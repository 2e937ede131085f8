"""Which runs `anywidth compare` takes for one series, and how it tells the others apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import command, succeed

from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.files import write_json
from anywidth.measuring.spectra import Spectrum, SpectrumPoint
from anywidth.width import ChannelConfig


def with_spectrum(folder: Path, error: float, **changes: object) -> Path:
    """A run that has a spectrum, whatever it was trained like."""
    settings = ClassificationSettings(**changes)
    width = settings.width if settings.method == "i" else 1.0
    name = f"{settings.method.upper()}-net"
    point = SpectrumPoint(width, ChannelConfig(()), round(1000 * width), 10, {"top1_error": error})
    write_json(
        Run.create(folder, settings).folder / "spectrum.json",
        Spectrum(name, (point,), settings.method).to_json(),
    )
    return folder


def test_runs_of_one_recipe_are_a_series_and_others_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # whose long path a legend would break
    first = with_spectrum(Path("first"), 10.0)
    seed = with_spectrum(Path("seed"), 20.0, seed=1, device="cpu", workers=3)
    longer = with_spectrum(Path("longer"), 30.0, epochs=20)
    plot = ("--out", Path("plot.svg"))
    answer = succeed("compare", first, seed, *plot)
    assert "15.00 ± 7.07" in answer.output
    assert "first" not in answer.output
    answer = succeed("compare", first, longer, seed, *plot)
    assert "15.00 ± 7.07" in answer.output
    assert "30.00" in answer.output
    drawn = Path("plot.svg").read_text()
    assert "US-net (first and 1 more)" in drawn
    assert "US-net (longer)" in drawn
    namesake = with_spectrum(Path("other", "longer"), 40.0, epochs=40)
    succeed("compare", longer, namesake, *plot)
    assert "US-net (other/longer)" in Path("plot.svg").read_text()


def test_one_training_is_not_two_seeds(tmp_path: Path) -> None:
    first = with_spectrum(tmp_path / "first", 10.0)
    again = with_spectrum(tmp_path / "again", 10.0, device="cpu")
    for other in (first, again):
        answer = command("compare", first, other, "--out", tmp_path / "plot.svg")
        assert answer.code == 2
        assert f"{first} and {other}" in answer.errors


def test_a_damaged_spectrum_is_named(tmp_path: Path) -> None:
    first, second = (with_spectrum(tmp_path / str(seed), 10.0, seed=seed) for seed in (0, 1))
    path = second / "spectrum.json"
    for damaged in (
        path.read_text().replace('"macs": 1000', '"macs": "many"'),
        path.read_text().replace('"points"', '"dots"'),
        path.read_text()[:40],
    ):
        path.write_text(damaged)
        answer = command("compare", first, second, "--out", tmp_path / "plot.svg")
        assert answer.code == 2
        assert answer.errors.count(str(path)) == 1
        assert f"anywidth spectrum {second}" in answer.errors


def test_individual_networks_of_several_widths_are_one_series(tmp_path: Path) -> None:
    narrow, wide = (
        with_spectrum(tmp_path / str(width), 10.0, method="i", width=width) for width in (0.5, 1.0)
    )
    plot = tmp_path / "plot.svg"
    succeed("compare", narrow, wide, "--out", plot)
    assert "I-net" in plot.read_text()
    assert "I-net (" not in plot.read_text()
