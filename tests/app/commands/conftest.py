"""Tiny runs, trained once; each test gets copies of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from command_line import TINY_RUN, succeed

OPTIONS = {
    "us": ("--low", "0.25"),
    "s": ("--method", "s", "--switches", "0.25,0.5,1.0", "--private-affine"),
    "i": ("--method", "i", "--width", "0.5", "--epochs", "1", "--no-report"),
    "bare": ("--low", "0.25", "--epochs", "1", "--no-report"),
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("trained")

    @cache
    def train(name: str) -> Path:
        succeed("train", *TINY_RUN, *OPTIONS[name], "--out", folder / name)
        return folder / name

    return train


@pytest.fixture
def us_net(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(trained("us"), tmp_path / "us")


@pytest.fixture
def s_net(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(trained("s"), tmp_path / "s")


@pytest.fixture
def i_net(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """Trained, and nothing more."""
    return shutil.copytree(trained("i"), tmp_path / "i")


@pytest.fixture
def bare(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """A US-Net without a spectrum, calibrated at its ends alone."""
    return shutil.copytree(trained("bare"), tmp_path / "bare")
