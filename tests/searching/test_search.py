"""A search finds better channels than the uniform width, within its budget, and can be resumed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anywidth as aw
from anywidth.searching.choices import Choices
from anywidth.searching.latency_fit import layer_terms
from anywidth.searching.latency_table import LatencyTable
from anywidth.searching.probes import network_key
from anywidth.slimming.norm_statistics import batch_statistics

Evaluate = Callable[[nn.Module], Mapping[str, float]]


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Eight patterns under noise."""
    patterns = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(77))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(8, (count,), generator=generator)
    return patterns[labels] + torch.randn(count, 1, 8, 8, generator=generator), labels


CALIBRATION = [batch(128, 2000), batch(128, 2001)]


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)]
    model = nn.Sequential(block(1, 32, 1), block(32, 32, 2), block(32, 32, 2), *head)
    widths = aw.WidthRange(0.125, 1.0, divisor=4)
    aw.slimmable(model, None, widths, example_input=torch.randn(2, 1, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampling = aw.Sampling(nonuniform=True)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, widths=sampling, autocast=None)
    for number in range(80):
        step(*batch(32, number))
    return model


def evaluate(model: nn.Module) -> dict[str, float]:
    images, labels = batch(256, 1000)
    logits = model(images)
    error = 100 * float((logits.argmax(1) != labels).float().mean())
    return {"loss": float(F.cross_entropy(logits, labels)), "top1_error": error}


def macs(model: nn.Module, share: float) -> aw.Budget:
    return aw.Budget("macs", share * aw.macs(model, 1.0))


def searched(model: nn.Module, *budgets: aw.Budget, **options) -> aw.SearchResult:
    given = {"evaluate": evaluate, "calibration": CALIBRATION, "progress": False} | options
    return aw.search(model, budget=budgets, **given)


@pytest.mark.parametrize("method", ["greedy", "evolution"])
def test_found_is_better_than_uniform_and_within_the_budget(trained: nn.Module, method) -> None:
    budgets = [macs(trained, 0.4), macs(trained, 0.15)]
    result = searched(trained, *budgets, method=method, population=8, generations=2)
    assert result.metric == "loss"
    assert result.is_complete
    for found, budget in zip(result.found, budgets, strict=True):
        assert found.budget == budget
        assert found.best.cost == aw.macs(trained, found.best.channels) <= budget.amount
        assert found.best.metrics["loss"] < found.uniform.metrics["loss"]
        assert not found.is_uniform
    costs = [one.cost for one in result.front]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == aw.macs(trained, 1.0)


def test_what_is_found_can_be_used_at_once(trained: nn.Module) -> None:
    found = searched(trained, macs(trained, 0.3)).found[0]
    small = aw.extract(trained, found.best.channels).eval()
    with torch.no_grad():
        loss = evaluate(small)["loss"]
    assert loss == pytest.approx(found.best.metrics["loss"], rel=1e-4)


def test_the_network_is_afterwards_as_before(trained: nn.Module) -> None:
    trained.eval()
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    expected = trained(batch(4, 5)[0])
    searched(trained, macs(trained, 0.5))
    assert not trained.training
    assert torch.equal(trained(batch(4, 5)[0]), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())


def test_nothing_better_is_said(trained: nn.Module) -> None:
    lattice = aw.plan_of(trained).lattice()

    def loves_uniform(model: nn.Module) -> dict[str, float]:
        shapes = [
            layer.weight.shape[0] for layer in model.modules() if isinstance(layer, nn.Conv2d)
        ]
        return {"loss": 0.0 if len(set(shapes)) == 1 else 1.0}

    found = searched(trained, macs(trained, 0.3), evaluate=loves_uniform).found[0]
    assert found.is_uniform
    assert found.best.channels in lattice


def test_higher_may_be_better(trained: nn.Module) -> None:
    def accuracy(model: nn.Module) -> dict[str, float]:
        return {"accuracy": -evaluate(model)["loss"]}

    by_accuracy = searched(trained, macs(trained, 0.3), evaluate=accuracy).found[0]
    by_loss = searched(trained, macs(trained, 0.3)).found[0]
    assert by_accuracy.best.channels == by_loss.best.channels


def test_parameters_are_a_budget(trained: nn.Module) -> None:
    most = 0.4 * aw.parameter_count(trained, 1.0)
    found = searched(trained, aw.Budget("parameters", most)).found[0]
    assert found.best.cost == aw.parameter_count(trained, found.best.channels) <= most


def test_a_killed_search_goes_on(trained: nn.Module, tmp_path: Path) -> None:
    notes, budget = tmp_path / "notes.json", macs(trained, 0.3)
    expected = searched(trained, budget)
    calls = 0

    def killed(model: nn.Module) -> Mapping[str, float]:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("killed")
        return evaluate(model)

    with pytest.raises(RuntimeError, match="killed"):
        searched(trained, budget, evaluate=killed, notes=notes)
    known = len(json.loads(notes.read_text())["known"])
    assert known == 11
    resumed = searched(trained, budget, notes=notes)
    assert resumed.found == expected.found
    assert resumed.passes == expected.passes - known


def test_ctrl_c_keeps_what_was_found(trained: nn.Module) -> None:
    calls = 0

    def interrupted(model: nn.Module) -> Mapping[str, float]:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise KeyboardInterrupt
        return evaluate(model)

    result = searched(trained, macs(trained, 0.05), evaluate=interrupted)
    assert not result.is_complete
    assert result.front
    assert result.found[0].is_uniform


def test_notes_of_other_weights_are_refused(trained: nn.Module, tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    searched(trained, macs(trained, 0.5), notes=notes)
    data = json.loads(notes.read_text())
    notes.write_text(json.dumps({**data, "network": "other"}))
    with pytest.raises(aw.AnywidthError, match="weights"):
        searched(trained, macs(trained, 0.5), notes=notes)
    notes.write_text(json.dumps({**data, "known": {"batch": 3}}))
    with pytest.raises(aw.AnywidthError, match="damaged"):
        searched(trained, macs(trained, 0.5), notes=notes)


def test_notes_of_another_judge_are_refused(trained: nn.Module, tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    searched(trained, macs(trained, 0.5), notes=notes)

    def other(model: nn.Module) -> dict[str, float]:
        images, labels = batch(256, 1001)
        return {"loss": float(F.cross_entropy(model(images), labels)), "top1_error": 0.0}

    with pytest.raises(aw.AnywidthError, match="other data"):
        searched(trained, macs(trained, 0.5), notes=notes, evaluate=other)


def test_ctrl_c_keeps_a_budget_that_the_front_has_passed(trained: nn.Module) -> None:
    budgets = macs(trained, 0.5), macs(trained, 0.03)
    whole = searched(trained, *budgets)
    calls = 0

    def interrupted(model: nn.Module) -> Mapping[str, float]:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return evaluate(model)

    stopped = searched(trained, *budgets, evaluate=interrupted)
    assert not stopped.is_complete
    assert 1 < len(stopped.front) < len(whole.front)
    assert not stopped.found[0].is_uniform
    assert stopped.found[0].best.cost <= budgets[0].amount
    assert stopped.found[1].is_uniform


@pytest.mark.parametrize("method", ["greedy", "evolution"])
def test_the_same_seed_gives_the_same_answer(trained: nn.Module, method: str) -> None:
    options = {"method": method, "population": 6, "generations": 2, "seed": 3}
    first, second = (searched(trained, macs(trained, 0.2), **options) for _ in range(2))
    assert first == second


def test_uniform_widths_are_judged_beside_the_front(trained: nn.Module) -> None:
    result = searched(trained, macs(trained, 0.3))
    lattice = aw.plan_of(trained).lattice()
    assert len(result.uniform) > 2
    assert all(one.channels in lattice for one in result.uniform)
    assert result.uniform[-1] == result.front[0]


def test_results_go_through_json(trained: nn.Module) -> None:
    result = searched(trained, macs(trained, 0.3))
    assert aw.SearchResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    with pytest.raises(aw.AnywidthError, match="search"):
        aw.SearchResult.from_json({"version": 1})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "luck"}, "luck"),
        ({"share": 0.0}, "share"),
        ({"population": 1}, "population"),
        ({"metric": "psnr"}, "psnr"),
    ],
)
def test_bad_options_are_named(trained: nn.Module, options, word: str) -> None:
    with pytest.raises(aw.AnywidthError, match=word):
        searched(trained, macs(trained, 0.3), **options)


def test_budgets_out_of_reach_are_named(trained: nn.Module) -> None:
    with pytest.raises(aw.AnywidthError, match="narrowest"):
        searched(trained, aw.Budget("macs", 10))
    with pytest.raises(aw.AnywidthError, match="widest"):
        searched(trained, macs(trained, 1.1))
    with pytest.raises(aw.AnywidthError, match="latencies"):
        searched(trained, aw.Budget("milliseconds", 1))
    with pytest.raises(aw.AnywidthError, match="kind"):
        searched(trained, macs(trained, 0.5), aw.Budget("parameters", 5000))


@pytest.mark.parametrize(
    ("kind", "text", "amount"),
    [("macs", "150M", 150e6), ("macs", "1.5g", 1.5e9), ("parameters", "250k", 250e3),
     ("milliseconds", "5ms", 5.0), ("milliseconds", "0.2s", 200.0)],
)  # fmt: skip
def test_budgets_are_read(kind, text: str, amount: float) -> None:
    assert aw.Budget.parse(kind, text) == aw.Budget(kind, amount)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("macs", "5ms"), ("milliseconds", "5"), ("macs", "much"), ("macs", "-3M"), ("macs", "0")],
)
def test_units_that_are_none_are_named(kind, text: str) -> None:
    with pytest.raises(aw.AnywidthError, match="budget"):
        aw.Budget.parse(kind, text)


def test_choices_stay_inside_the_range(trained: nn.Module) -> None:
    plan = aw.plan_of(trained)
    choices = Choices(plan)
    assert choices.widest == plan.widest
    assert choices.narrowest == plan.narrowest
    config = choices.widest
    while (narrower := choices.narrower(config, "0.0", 0.3)) is not None:
        plan.check(narrower)
        assert narrower["0.0"] < config["0.0"]
        config = narrower
    assert config["0.0"] == choices.narrowest["0.0"]


def test_batch_statistics_leave_no_trace(trained: nn.Module) -> None:
    images = batch(64, 3)[0]
    config = aw.plan_of(trained).resolve({"0.0": 0.5})
    trained.train()
    with torch.no_grad(), aw.at_width(trained, config):
        expected = trained(images)
    trained.eval()
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    with torch.no_grad(), aw.at_width(trained, config):
        with batch_statistics(trained):
            torch.testing.assert_close(trained(images), expected)
        with pytest.raises(aw.AnywidthError, match="calibrate"):
            trained(images)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())


def test_exact_answers_are_those_of_this_calibration(trained: nn.Module, tmp_path: Path) -> None:
    """Notes of a search with other calibration data have other exact answers."""
    notes, budget = tmp_path / "notes.json", macs(trained, 0.3)
    aw.search(
        trained, evaluate, budget, progress=False, notes=notes,
        calibration=[3 * images + 1 for images, _ in CALIBRATION],
    )  # fmt: skip
    assert searched(trained, budget, notes=notes).found == searched(trained, budget).found


def test_notes_of_the_same_weights_in_another_order_are_refused(
    trained: nn.Module, tmp_path: Path
) -> None:
    """The widest network is the same, and no other width is."""
    notes = tmp_path / "notes.json"
    searched(trained, macs(trained, 0.5), notes=notes)
    turned = copy.deepcopy(trained)
    with torch.no_grad():
        first, norm, second = turned[0][0], turned[0][1], turned[1][0]  # type: ignore[index]
        for tensor in (first.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.copy_(tensor.flip(0))
        second.weight.copy_(second.weight.flip(1))
    with pytest.raises(aw.AnywidthError, match="weights"):
        searched(turned, macs(turned, 0.5), notes=notes)


def test_a_judge_that_fails_is_named(trained: nn.Module) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(aw.AnywidthError, match="widest"):
            searched(trained, macs(trained, 0.5), evaluate=lambda model, v=value: {"loss": v})


def test_a_budget_is_met_to_the_last_multiply_add() -> None:
    """2.01 * 1e6 is less than 2,010,000."""
    for hundredths in range(1, 3000):
        found = aw.Budget.parse("macs", f"{hundredths / 100}M")
        assert found.amount == 10_000 * hundredths


def costing(model: nn.Module, first: float, second: float) -> LatencyTable:
    """A table of another device, on which a channel of two layers takes so many milliseconds."""
    plan = aw.plan_of(model)
    layers = dict.fromkeys(layer_terms(plan, plan.full, 1), (0.0, 0.0, 0.0, 0.0))
    layers |= {"0.0": (first, 0.0, 0.0, 0.0), "1.0": (second, 0.0, 0.0, 0.0)}
    return LatencyTable("another", network_key(plan), 10.0, 1, layers, 0.0, plan)


@pytest.mark.parametrize("method", ["greedy", "evolution"])
def test_a_budget_that_no_uniform_width_meets_is_met(trained: nn.Module, method: str) -> None:
    """Where a wide layer is the faster one, every uniform width may be too slow."""
    table = costing(trained, -0.1, 0.2)
    cheapest = Choices(aw.plan_of(trained), table.predict).cheapest()
    budget = aw.Budget("milliseconds", table.predict(cheapest) + 0.1)
    assert table.predict(aw.plan_of(trained).narrowest) > budget.amount

    def prefers_uniform(model: nn.Module) -> dict[str, float]:
        return {"loss": float(model[0][0].weight.shape[0])}  # type: ignore[index]

    found = aw.search(
        trained, prefers_uniform, budget, calibration=CALIBRATION, latencies=table, method=method,
        share=0.5, population=4, generations=1, progress=False,
    ).found[0]  # fmt: skip
    assert found.best.cost <= budget.amount < found.uniform.cost
