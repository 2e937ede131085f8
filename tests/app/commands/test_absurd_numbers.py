"""Numbers that nobody means: refused before anything is trained, never a traceback or a hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import TINY_RUN, assert_refused, command
from torch import Tensor, nn

from anywidth.app.model_spec import parse_input
from anywidth.app.tasks.classification.networks import check_logits
from anywidth.errors import AnywidthError
from anywidth.measuring.progress import _clock


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--epochs", 10**20),
        ("--seed", 2**70),
        ("--widths-per-step", 10**9),
        ("--workers", 10**6),
        ("--batch-size", 10**20),
        ("--learning-rate", 1e308),
        ("--warmup-epochs", 1e300),
        ("--image-size", 10**9),
    ],
)
def test_an_absurd_setting_is_refused(option: str, value: float, tmp_path: Path) -> None:
    answer = command("train", *TINY_RUN, option, value, "--out", tmp_path / "run")
    assert_refused(answer, option)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text", ["3x99999x99999", f"{10**30}x3x3", "9" * 5000, "3x0x3", "3x-1x3", "1_0x3", "", "x"]
)
def test_an_absurd_input_is_refused(text: str) -> None:
    with pytest.raises(AnywidthError, match="shape"):
        parse_input(text)


def test_the_remaining_time_may_be_longer_than_a_life() -> None:
    assert "100 years" in _clock(1e30)
    assert "100 years" in _clock(float("inf"))
    assert _clock(61) == "0:01:01"


class Answers(nn.Module):
    """Returns something else in training, as some networks with auxiliary heads do."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> object:
        return self.answer if self.training else torch.zeros(len(x), 10)


@pytest.mark.parametrize("answer", [{"logits": torch.zeros(2, 10)}, torch.zeros(2, 3)])
def test_a_network_without_logits_is_refused_by_its_option(answer: object) -> None:
    with pytest.raises(AnywidthError, match="--model") as raised:
        check_logits(Answers(answer), 10, (1, 4, 4), "my:network")
    assert "distill=" not in str(raised.value)
    check_logits(Answers(torch.zeros(2, 10)), 10, (1, 4, 4), "my:network")
