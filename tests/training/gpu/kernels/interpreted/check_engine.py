"""The graph engine with the kernels: sums of gradients, cast weights and statistics of a step."""

from collections.abc import Callable, Iterator

import pytest
import torch
from interpreter import assert_near
from torch import Tensor, nn

import anywidth as aw
from anywidth.models.building import conv_norm
from anywidth.models.mobilenet_v2 import InvertedResidual
from anywidth.slimming.norm_statistics import tracked_statistics
from anywidth.slimming.switchable import add_private_affine
from anywidth.training.engine.capture import CudaCapture
from anywidth.training.engine.graphs import GraphEngine
from anywidth.training.gpu import fast_convolutions, kernels
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.gpu.kernels import batch_norm_small

WIDTHS = (1.0, 0.3)
DTYPE = torch.bfloat16


class RunAgain(CudaCapture):
    """Runs a pass again in place of its graph: the interpreter's work cannot be recorded."""

    def reaches(self, tensors: object) -> bool:
        return True

    def start_anew(self) -> None:
        pass

    def run(self, function: Callable) -> object:
        return function()

    def capture(self, function: Callable) -> Callable:
        return function


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        conv_norm(3, 8, 3, activation=nn.ReLU6),
        InvertedResidual(8, 8, 1, expansion=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    example = torch.randn(2, 3, 8, 8)
    return aw.slimmable(
        nn.Sequential(*layers), None, aw.WidthRange(0.25, 1.0, 4), example_input=example
    )


def _freeze_last_norm(model: nn.Module) -> None:
    aw.calibrate(model, [torch.randn(8, 3, 6, 6)], [0.3])
    model.train()
    [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)][-1].eval()


def _add_switches_and_freeze_a_weight(model: nn.Module) -> None:
    add_private_affine(model, [0.3])
    next(model.parameters()).requires_grad_(False)


PREPARATIONS: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "switches and a frozen weight": _add_switches_and_freeze_a_weight,
    "a frozen norm": _freeze_last_norm,
}


def _trained(
    prepare: Callable[[nn.Module], object],
    kernels: bool,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
) -> list[Tensor]:
    """A step from the gradients of two batches: gradients, weights and statistics."""
    model = _network().to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    prepare(model)
    model = model.to(dtype)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:3], 0.05), torch.optim.AdamW(parameters[3:], 1e-3)]
    step = aw.SandwichStep(
        model,
        optimizers,
        nn.functional.cross_entropy,
        widths=aw.Sampling("fixed", widths=WIDTHS),
        weights="balanced",
        autocast=autocast,
    )
    if kernels:
        use_kernels(model)
        objective = step.engine.objective
        step.engine = GraphEngine(model, step.parameters, objective, capture=RunAgain())
    for seed in range(2):
        torch.manual_seed(seed)
        images, labels = torch.randn(4, 3, 6, 6).to(dtype), torch.arange(4)
        step.backward(images, labels, scale=torch.tensor(0.5))
    found = [p.grad.clone() for p in parameters if p.grad is not None]
    for optimizer in optimizers:
        optimizer.step()
    entries = [tensor for entry in tracked_statistics(model) for tensor in entry.tensors()]
    return [tensor.detach().double() for tensor in (*found, *model.state_dict().values(), *entries)]


@pytest.fixture(autouse=True)
def many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are left to convolutions, however few their pixels."""
    monkeypatch.setattr(batch_norm_small, "MOST_PIXELS", 0)


@pytest.fixture(params=[False, True], ids=["", "products"])
def products(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[bool]]:
    """Pointwise convolutions have kernels, or have none; for each use, whether with a norm."""
    normed: list[bool] = []
    whole = kernels.pointwise_conv2d_with_statistics

    def watched(x: Tensor, weight: Tensor, made: int, norm: object, *more: object) -> object:
        normed.append(norm is not None)
        return whole(x, weight, made, norm, *more)

    monkeypatch.setattr(kernels, "pointwise_conv2d_with_statistics", watched)
    monkeypatch.setattr(fast_convolutions, "USES_PRODUCTS", request.param)
    yield normed
    assert bool(normed) == request.param


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("name", PREPARATIONS)
def test_steps_are_those_of_plain_layers_in_float64(name: str) -> None:
    exact = _trained(PREPARATIONS[name], kernels=False, dtype=torch.float64)
    ours = _trained(PREPARATIONS[name], kernels=True)
    assert len(ours) == len(exact)
    for found, expected in zip(ours, exact, strict=True):
        assert_near(found, expected, 5e-4)


def test_steps_under_autocast_are_as_exact_as_those_of_plain_layers(products: list[bool]) -> None:
    exact, plain, ours = (
        torch.cat([tensor.flatten() for tensor in _trained(PREPARATIONS["nothing"], *options)])
        for options in (
            (False, torch.float64),
            (False, torch.float32, DTYPE),
            (True, torch.float32, DTYPE),
        )
    )
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()
    assert not products or set(products) == {False, True}
