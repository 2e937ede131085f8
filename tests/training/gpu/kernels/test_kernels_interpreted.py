"""The mathematics of the kernels, run by Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported, so each file of checks is a pytest of its
own, in its own process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))


@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_interpreted(checks):
    command = [sys.executable, "-m", "pytest", str(checks), "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, "-o", "python_files=check_*.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_every_file_of_checks_is_run():
    assert [path.stem for path in CHECKS] == [
        "check_batch_norm",
        "check_crop_resize",
        "check_deferred_norm",
        "check_depthwise",
        "check_engine",
        "check_layers",
        "check_norm_sum",
        "check_pointwise",
        "check_stem",
    ]
