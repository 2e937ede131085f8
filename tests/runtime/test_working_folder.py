"""`python -m anywidth_runtime` may be used in anyone's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from command_line import environment


def test_python_m_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    for name in ("__future__", "typing", "argparse", "numpy", "onnxruntime", "uvicorn"):
        (tmp_path / f"{name}.py").write_text(f"print('executed {name}')\nraise SystemExit(3)\n")
    done = subprocess.run(
        [sys.executable, "-m", "anywidth_runtime", "serve", "--help"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done
    assert "executed" not in done.stdout
