"""`anywidth inspect`: the plan and costs for people and for machines, errors on one line."""

import json
from pathlib import Path

import pytest
import torch
from command_line import Answer, command

import anywidth as aw

CODE = """
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)
        self.last = nn.Linear(32, 5)

    def forward(self, x):
        x = self.second(self.first(x).cumsum(1))
        return self.last(x.mean((2, 3)))

def branches():
    class Branches(nn.Linear):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Branches(8, 8)

def wordy():
    raise RuntimeError("one line\\nand another")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inspected_networks.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run(*arguments: str) -> Answer:
    return command("inspect", *arguments)


def test_tables_show_groups_reasons_and_exact_costs() -> None:
    code, out, err = run("mobilenet_v2", "--input", "3x32x32", "--no-verify")
    assert code == 0
    assert "51 of 53" in out
    assert "6 x features.14.layers.2.0" in out
    assert "fixed: " in out
    plan = aw.plan(aw.models.mobilenet_v2(), torch.randn(2, 3, 32, 32))
    for width in (0.25, 0.5, 0.75, 1.0):
        assert f"{aw.macs(plan, width):,}" in out
        assert f"{aw.parameter_count(plan, width):,}" in out
    assert err.splitlines() == ["building mobilenet_v2", "tracing mobilenet_v2"]


def test_json_is_all_there_is_on_standard_output() -> None:
    code, out, err = run(
        "inspected_networks:Odd", "--input", "3x8x8", "--widths", "0.5,1.0", "--json"
    )
    assert code == 0
    data = json.loads(out)
    assert data["model"] == "inspected_networks:Odd"
    assert data["input"] == [3, 8, 8]
    assert data["verified"] is True
    assert data["layers"] == 3
    plan = aw.Plan.from_json(data["plan"])
    assert data["elastic_layers"] == plan.elastic_layers()[0]
    assert data["costs"] == [
        {"width": w, "macs": aw.macs(plan, w), "parameters": aw.parameter_count(plan, w)}
        for w in (0.5, 1.0)
    ]
    assert "verifying inspected_networks:Odd" in err


def test_the_range_and_divisor_reach_the_plan() -> None:
    arguments = ("inspected_networks:Odd", "--input", "3x8x8", "--no-verify", "--json")
    code, out, _ = run(*arguments, "--low", "0.5", "--high", "0.8", "--divisor", "4")
    assert code == 0
    data = json.loads(out)
    assert data["plan"]["widths"] == [0.5, 0.8, 4]
    assert [row["width"] for row in data["costs"]] == [0.5, 0.6, 0.7, 0.8]
    assert data["verified"] is False


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), (None, 120)])
def test_tables_fit_a_narrow_terminal_and_are_wide_in_a_pipe(
    columns: str | None, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("mobilenet_v1", "--input", "3x32x32", "--no-verify")
    assert code == 0
    assert max(map(len, out.splitlines())) <= widest
    assert columns is not None or "features.13.0.0" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet50"], "'resnet50'"),
        (["torchvision:resnet51"], "resnet50"),
        (["inspected_networks:Odd", "--input", "3xbig"], "'3xbig'"),
        (["inspected_networks:Odd", "--input", "4x8x8"], "exported"),
        (["inspected_networks:branches", "--input", "8"], "exported"),
        (["inspected_networks:wordy"], "one line and another"),
        (["inspected_networks:Odd", "--widths", "wide"], "'wide'"),
        (["inspected_networks:Odd", "--widths", "0.1"], "0.1"),
        (["inspected_networks:Odd", "--low", "2"], "low"),
        (["inspected_networks:Odd", "--divisor", "0"], "divisor"),
    ],
)
def test_an_error_is_one_line_and_exit_code_two(arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("anywidth: ")
    assert message in last
    assert sum(line.startswith("anywidth:") for line in err.splitlines()) == 1
    assert "Traceback" not in err


def test_help_has_an_example_of_every_form() -> None:
    code, out, _ = run("--help")
    assert code == 0
    for text in ("anywidth inspect torchvision:resnet50", "--no-verify", "timm:NAME", "--json"):
        assert text in out
