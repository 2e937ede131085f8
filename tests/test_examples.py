"""The examples and a benchmark run, with a small budget, and do what they say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import HANGS_AFTER, environment

ROOT = Path(__file__).parent.parent


def python(*arguments: str | Path) -> str:
    """What a program that must work prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, *arguments: str) -> str:
    return python("-W", "error::UserWarning:anywidth", f"examples/{name}.py", *arguments)


def test_own_model() -> None:
    output = example("own_model", "--images", "100", "--epochs", "1")
    assert "53 of 54 layers can be narrowed" in output
    found = re.findall(r"width ([\d.]+):\s+([\d.]+) M multiply-adds, ([\d.]+) %", output)
    assert [width for width, _, _ in found] == ["0.5", "0.6", "0.8", "1.0"]
    costs = [float(cost) for _, cost, _ in found]
    assert costs == sorted(costs)
    # The extracted network predicts what the sliced one does.
    sliced = float(found[1][2])
    extracted = re.search(r"extracted at 0\.6: [\d,]+ parameters, ([\d.]+) %", output)
    assert extracted is not None
    assert abs(float(extracted[1]) - sliced) <= 0.2


SMALL = ("--images", "600", "--epochs", "2")


def errors(output: str) -> dict[str, float]:
    return {w: float(e) for w, e in re.findall(r"width ([\d.]+): error ([\d.]+) %", output)}


@pytest.mark.parametrize(
    "name",
    ["lightning_module", "accelerate_accumulation", "huggingface_trainer", "timm_training"],
)
def test_training_stacks(name: str) -> None:
    found = errors(example(name, *SMALL))
    assert found.keys() == {"0.25", "0.5", "1.0"}
    assert min(found.values()) < 80, "nothing was learned: by chance it is 90"


def test_detector() -> None:
    output = example("detector", "--steps", "3")
    found = dict(re.findall(r"^(.*): .*overlap ([\d.]+)$", output, re.MULTILINE))
    assert found.keys() == {"width 0.25", "width 0.5", "width 1.0", "extracted at 0.25"}
    assert found["extracted at 0.25"] == found["width 0.25"] != "0.000"
    assert len(set(found.values())) == 3, "each width detects something else"


def test_several_processes() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = python(*launcher, "examples/several_processes.py", *SMALL)
    assert min(errors(output).values()) < 80


def test_the_calibration_benchmark_compares_like_with_like(tmp_path: Path) -> None:
    result = tmp_path / "calibration.json"
    small = ("--widths", "3", "--samples", "8", "--batch-size", "4", "--rounds", "1")
    output = python("-m", "benchmarks.calibration", *small, "--out", result)
    found = json.loads(result.read_text())
    seconds = found["seconds"]
    for name in ("evaluation", "training_norms"):
        expected = seconds["calibration"] / seconds[name]
        assert abs(found[f"ratio_to_{name}"] / expected - 1) < 0.02
    assert f"costs {found['ratio_to_evaluation']} times" in output


def test_the_demo_benchmark_records_its_command_and_keeps_recipes_apart(tmp_path: Path) -> None:
    result, fields = tmp_path / "demo.json", {"model": "tiny_networks:tiny", "total_stride": "none"}
    fields |= {"multiplier": "1"}
    fields |= {"limit": "100", "batch_size": "50", "epochs": "1", "calibration_samples": "50"}
    runs = ("--seeds", "1", "--processes", "1", "--runs", str(tmp_path / "runs"))
    options = (*runs, "--only", "I-Net 0.25", "--device", "cpu", "--out", str(result))
    settings = [f"{name}={value}" for name, value in fields.items()]
    python("-m", "benchmarks.demo", *options, "--set", *settings)
    record = json.loads(result.read_text())
    assert shlex.split(record["command"])[3:] == [*options, "--set", *settings]
    assert record["device"].endswith("CPU, 1 thread")
    assert record["commit"]
    assert list(record["top1_error"]["I-Net 0.25"]) == ["0.25"]
    with pytest.raises(AssertionError, match="epochs 1, not 2"):
        python("-m", "benchmarks.demo", *options, "--set", *settings, "epochs=2")
