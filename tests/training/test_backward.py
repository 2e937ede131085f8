"""`step.backward`: gradients of all widths added up, and whoever takes the optimiser's step."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from recorded_passes import RecordedPasses
from tiny_networks import converted, images_and_labels, without_norms
from torch import Tensor, nn

import anywidth as aw
from anywidth.training.engine.graphs import GraphEngine

FIXED = aw.Sampling("fixed", widths=(0.25, 0.5, 1.0))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_it_adds_gradients_and_does_nothing_else() -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy)
    images, labels = images_and_labels(8)
    before = weights(model)
    step.backward(images, labels)
    once = gradients(model)
    step.count = 0
    result = step.backward(images, labels, scale=0.5)
    torch.testing.assert_close(gradients(model), [1.5 * grad for grad in once])
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert step.count == 1
    step.count = 0
    model.zero_grad()
    torch.testing.assert_close(step.backward(images, labels).losses, result.losses)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_accumulated_micro_batches_are_the_whole_batch(is_recorded: bool) -> None:
    images, labels = images_and_labels(16)
    images = images.double()
    found = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = converted(without_norms()).double()
        step = aw.SandwichStep(model, None, F.cross_entropy, widths=FIXED)
        if is_recorded:
            objective, passes = step.engine.objective, RecordedPasses()
            step.engine = GraphEngine(model, step.parameters, objective, capture=passes)
        for _ in range(2):  # graphs are replayed the second time
            model.zero_grad()
            for part in zip(images.chunk(parts), labels.chunk(parts), strict=True):
                step.backward(*part, scale=1 / parts)
        found.append(gradients(model))
    torch.testing.assert_close(*found)


def test_graphs_add_to_gradients_of_the_users_own() -> None:
    images, labels = images_and_labels(16)
    found = []
    for is_recorded in (False, True):
        torch.manual_seed(0)
        model = converted().double()
        step = aw.SandwichStep(model, None, F.cross_entropy, widths=FIXED)
        if is_recorded:
            objective, passes = step.engine.objective, RecordedPasses()
            step.engine = GraphEngine(model, step.parameters, objective, capture=passes)
        for set_to_none in (True, False):
            model.zero_grad(set_to_none)
            model(images.double()).square().mean().backward()
            step.backward(images.double(), labels, scale=torch.tensor(0.5))
            step.backward(images.double(), labels)
        found.append(gradients(model))
    torch.testing.assert_close(*found)


def test_float16_with_a_scaler() -> None:
    model = converted(without_norms())
    optimizer = sgd(model)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy, widths=FIXED, autocast=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    images, labels = images_and_labels(32)
    plain = copy.deepcopy(model)
    aw.SandwichStep(plain, sgd(plain), F.cross_entropy, widths=FIXED)(images, labels)
    result = step.backward(images, labels, scale=scaler.scale(torch.ones(())))
    assert result.outputs[0].dtype == torch.float16
    largest = max(float(grad.abs().max()) for grad in gradients(model))
    assert largest > 100, "gradients are not scaled"
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-2, atol=1e-3)


def test_accelerate_accumulates() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    images, labels = images_and_labels(16)
    torch.manual_seed(0)
    plain = converted(without_norms())
    model = copy.deepcopy(plain)
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    step = aw.SandwichStep(
        accelerator.unwrap_model(prepared), optimizer, F.cross_entropy, widths=FIXED
    )
    for part in zip(images.chunk(2), labels.chunk(2), strict=True):
        with accelerator.accumulate(prepared):
            step.backward(*part, scale=1 / 2)
            optimizer.step()
            optimizer.zero_grad()
    aw.SandwichStep(plain, sgd(plain), F.cross_entropy, widths=FIXED)(images, labels)
    torch.testing.assert_close(weights(model), weights(plain))
    with pytest.raises(aw.AnywidthError, match="backward"):
        step(images, labels)


def test_gradients_that_others_accumulate_are_not_dropped() -> None:
    model = converted()
    optimizer = sgd(model)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy)
    images, labels = images_and_labels(8)
    step(images, labels)
    step(images, labels)
    for add in (
        lambda: F.cross_entropy(model(images), labels).backward(),
        lambda: step.backward(images, labels),
    ):
        add()
        with pytest.raises(aw.AnywidthError, match="backward"):
            step(images, labels)
        optimizer.zero_grad(set_to_none=False)
        step(images, labels)


def test_a_second_step_with_the_same_gradients_is_refused() -> None:
    """A framework that takes the optimiser's step itself would take it twice."""
    model = converted()
    optimizer = sgd(model)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy)
    images, labels = images_and_labels(8)
    step(images, labels)
    with pytest.raises(aw.AnywidthError, match="backward"):
        optimizer.step()
    step(images, labels)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    aw.SandwichStep(model, sgd(model), F.cross_entropy)(images, labels)  # takes turns with another
    step(images, labels)
    optimizer.zero_grad()
    step.backward(images, labels)
    optimizer.step()


@pytest.mark.parametrize("by_hand", [False, True])
def test_several_optimizers_each_take_a_step(by_hand: bool) -> None:
    images, labels = images_and_labels(8)
    models = [copy.deepcopy(converted()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    head, rest = list(models[1][9].parameters()), list(models[1][:9].parameters())  # type: ignore[index]
    several = [torch.optim.SGD(head, lr=0.1), torch.optim.SGD(rest, lr=0.1)]
    aw.SandwichStep(models[0], sgd(models[0]), F.cross_entropy)(images, labels)
    step = aw.SandwichStep(models[1], several, F.cross_entropy)
    if by_hand:
        step.backward(images, labels)
        for optimizer in several:
            optimizer.step()
            optimizer.zero_grad()
    else:
        step(images, labels)
    torch.testing.assert_close(weights(models[0]), weights(models[1]))


def test_what_takes_no_such_step_is_refused() -> None:
    model = converted()
    with pytest.raises(aw.AnywidthError, match="LBFGS"):
        aw.SandwichStep(model, torch.optim.LBFGS(model.parameters()), F.cross_entropy)
    step = aw.SandwichStep(model, None, F.cross_entropy)
    with pytest.raises(aw.AnywidthError, match="without an optimizer"):
        step(*images_and_labels(8))


def test_a_step_goes_on_from_its_state() -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy)
    for _ in range(3):
        step(*images_and_labels(8))
    other = aw.SandwichStep(model, sgd(model), F.cross_entropy)
    other.load_state_dict(step.state_dict())
    assert other(*images_and_labels(8)).widths == step(*images_and_labels(8)).widths
    for bad in ({}, {"count": -1}, {"count": 0.5}, 3):
        with pytest.raises(aw.AnywidthError, match="count"):
            step.load_state_dict(bad)  # type: ignore[arg-type]


class OwnLoss(nn.Module):
    """Takes named arguments and computes its loss, as language models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.body(features)
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels), {"logits": logits, "step": 3, "note": "text"}


def own_loss() -> OwnLoss:
    model = OwnLoss()
    aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 4), example_input=torch.randn(2, 8))
    return model


@pytest.mark.parametrize("kind", [dict, collections.UserDict])
def test_a_dict_of_inputs_is_keyword_arguments(kind: Any) -> None:
    model = own_loss()
    batch = kind(features=torch.randn(4, 8), labels=torch.randint(10, (4,)))

    def distill(output: Any, full: Any) -> Tensor:
        return aw.soft_cross_entropy(output[1]["logits"], full[1]["logits"])

    step = aw.SandwichStep(model, sgd(model), lambda output, _: output[0], distill)
    result = step(batch)
    assert [type(output) for output in result.outputs] == [tuple] * 4
    assert result.outputs[0][1]["note"] == "text"
    assert not any(output[1]["logits"].requires_grad for output in result.outputs)
    by_hand = model(*batch.values())
    assert by_hand[0].requires_grad


def test_a_loss_that_is_no_scalar_is_named() -> None:
    model = own_loss()
    batch = {"features": torch.randn(4, 8), "labels": torch.randint(10, (4,))}
    with pytest.raises(aw.AnywidthError, match="logs"):
        aw.SandwichStep(model, sgd(model), lambda output, _: output, None)(batch)
    with pytest.raises(aw.AnywidthError, match="shape"):
        aw.SandwichStep(model, sgd(model), lambda output, _: output[1]["logits"], None)(batch)


def test_a_result_names_its_widths() -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy)
    result = step(*images_and_labels(8))
    assert result.fractions[:2] == [1.0, 0.25]
    assert all(0.25 <= fraction <= 1.0 for fraction in result.fractions)
    fixed = aw.SandwichStep(model, sgd(model), F.cross_entropy, widths=FIXED)
    assert fixed(*images_and_labels(8)).fractions == [1.0, 0.5, 0.25]
