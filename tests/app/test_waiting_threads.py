"""The command lets PyTorch's threads sleep soon, unless the user has chosen how they wait."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from anywidth.app.cli import main
assert "torch" not in sys.modules, "it reads the variable when it is imported"
sys.argv = ["anywidth", "train", "--list"]
try:
    main()
except SystemExit:
    print("spins", os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "5"}, "5"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_threads_sleep_soon_unless_told_otherwise(chosen: dict[str, str], spins: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**kept, **chosen}, capture_output=True, text=True
    )
    assert f"spins {spins}" in found.stdout.splitlines(), found.stderr
