"""The examples run, with a small budget, and do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from command_line import environment

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:anywidth", EXAMPLES / name, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_model() -> None:
    output = run_example("own_model.py", "--images", "100", "--epochs", "1")
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
