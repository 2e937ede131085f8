"""A network opened from a bundle: widths, inputs, latency, and no PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import anywidth_runtime
import numpy as np
import pytest
from anywidth_runtime import BundleError
from anywidth_runtime.server.options import main
from tiny_networks import PIXELS, batches_of, converted

import anywidth as aw

WIDTHS = [0.25, 0.5, 1.0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "net.anywidth"
    model = converted()
    aw.calibrate(model, batches_of([16]), widths=WIDTHS)
    aw.export_bundle(model, path, WIDTHS, measure_latency=False, progress=False)
    return path


def images(count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).random((count, 1, PIXELS, PIXELS), np.float32)


def test_it_runs_without_torch(bundle: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import anywidth_runtime, numpy; "
        "net = anywidth_runtime.open(sys.argv[1]); "
        f"x = numpy.zeros((2, 1, {PIXELS}, {PIXELS}), numpy.float32); "
        "assert net.run(x, width=0.5).shape == (2, 10); "
        "assert not [name for name in sys.modules if name == 'anywidth']"
    )
    arguments = [sys.executable, "-c", code, str(bundle)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("array", "width", "word"),
    [
        (images(), 0.4, "0.5"),
        (images(), "fast", "fast"),
        (images()[:, :, 1:], 0.5, "shape"),
        (images().astype(float), 0.5, "float64"),
        (images()[:0], 0.5, "shape"),
        ({"pictures": images()}, 0.5, "pictures"),
    ],
)
def test_wrong_calls_are_named(bundle: Path, array: object, width: float | str, word: str) -> None:
    with pytest.raises(anywidth_runtime.RequestError, match=word):
        anywidth_runtime.open(bundle).run(array, width=width)


def test_latency_is_measured_once(bundle: Path) -> None:
    net = anywidth_runtime.open(bundle)
    with pytest.raises(anywidth_runtime.RequestError, match="measure"):
        net.width_for(milliseconds=5)
    rows = net.measure(repeats=3)
    assert [row.width for row in rows] == WIDTHS
    assert all(row.latency_ms is not None and row.latency_ms > 0 for row in rows)
    again = anywidth_runtime.open(bundle)
    assert again.width_for(milliseconds=1000) == 1.0
    with pytest.raises(anywidth_runtime.RequestError, match="fastest"):
        again.width_for(milliseconds=1e-6)


def test_the_least_recently_used_width_is_closed(bundle: Path) -> None:
    net = anywidth_runtime.open(bundle, memory_limit=1)
    for width in WIDTHS:
        net.run(images(), width=width)
        assert net.open_widths == (width,)
    with pytest.raises(anywidth_runtime.RequestError, match="memory_limit"):
        net.prepare()
    roomy = anywidth_runtime.open(bundle)
    roomy.prepare([0.25, 1.0])
    assert roomy.open_widths == (0.25, 1.0)


def test_a_governor_chooses_among_measured_widths(bundle: Path, tmp_path: Path) -> None:
    copied = tmp_path / "net.anywidth"
    copied.write_bytes(bundle.read_bytes())
    net = anywidth_runtime.open(copied)
    with pytest.raises(anywidth_runtime.RequestError, match="measure"):
        anywidth_runtime.Governor.of(net)
    net.measure(repeats=3, progress=False)
    governor = anywidth_runtime.Governor.of(net, least_width=0.5)
    assert governor.width_for(milliseconds=1e6) == max(one.width for one in governor.menu)
    assert governor.width_for(milliseconds=1e-6) == min(one.width for one in governor.menu) >= 0.5


def test_a_bundle_is_measured_by_command(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copy(bundle, tmp_path / "net.anywidth")
    assert main(["measure", str(path), "--repeats", "2"]) == 0
    assert "ms" in capsys.readouterr().out
    assert Path(f"{path}.latency.json").is_file()
    assert anywidth_runtime.open(path).is_measured
    assert main(["measure", str(tmp_path / "missing.anywidth")]) == 2


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "net.anywidth"
    os.mkfifo(path)
    with pytest.raises(BundleError, match="pipe"):
        anywidth_runtime.open(path)
