"""Norms that wait for residual sums, against PyTorch in float64; and what may happen to them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from interpreter import assert_near
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy, relu
from torch.utils.checkpoint import checkpoint

import anywidth as aw
from anywidth.errors import AnywidthError
from anywidth.training.gpu import kernels, residual_sums
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.gpu.fast_paths import fast_path
from anywidth.training.gpu.kernels import batch_norm_small
from anywidth.training.gpu.kernels.shared_buffers import gradients_added_to

SHAPES = [(2, 3, 5, 7), (3, 8, 7, 8), (1, 33, 4, 5), (37, 4, 2, 4), (2, 72, 5, 5)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm_small, "MOST_PIXELS", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str]]:
    """What the kernel was asked for: whether there is a sum, and the activation."""
    asked: list[tuple[bool, str]] = []
    whole = kernels.norm_and_sum

    def watched(x: Tensor, norm: object, other: Tensor | None, activation: str) -> Tensor:
        asked.append((other is not None, activation))
        return whole(x, norm, other, activation)  # type: ignore[arg-type, no-any-return]

    monkeypatch.setattr(kernels, "norm_and_sum", watched)
    return asked


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    channels = shape[1]
    x, other, dy = (
        torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for _ in range(3)
    )
    weight, bias = torch.rand(channels + 3) + 0.5, torch.randn(channels + 3)
    exact = [t.double().requires_grad_() for t in (x, other, weight, bias)]
    z = batch_norm(exact[0], None, None, exact[2][:channels], exact[3][:channels], True) + exact[1]
    dy[(z.detach().abs() < 2e-2)] = 0  # where rounding may decide the side
    expected = relu(z) if activation == "relu" else z
    expected.backward(dy.double())

    ours = [t.requires_grad_() for t in (x, other, weight, bias)]
    norm = kernels.deferred_norm(ours[0], kernels.BatchNorm(ours[2], ours[3]))
    y = kernels.norm_and_sum(ours[0], norm, ours[1], activation)
    y.backward(dy)
    assert_near(y, expected, TOLERANCE[dtype])
    for found, reference in zip(ours, exact, strict=True):
        assert found.grad is not None
        assert_near(found.grad, reference.grad, TOLERANCE[dtype])


def test_gradients_are_added_to_sums() -> None:
    x = torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    other = torch.randn_like(x)
    weight, bias = torch.ones(11, requires_grad=True), torch.zeros(11, requires_grad=True)
    sums = [torch.ones(11), torch.ones(11)]

    def run() -> None:
        norm = kernels.deferred_norm(x, kernels.BatchNorm(weight, bias))
        kernels.norm_and_sum(x, norm, other, "relu").square().sum().backward()

    run()
    with gradients_added_to([weight, bias], sums):
        run()
    assert_near(sums[0], weight.grad + 1, 1e-6)
    assert_near(sums[1], bias.grad + 1, 1e-6)


# ---- networks ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block; `form` says how its end is written, and is given its parts."""

    def __init__(self, form: Callable[[Block, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first = nn.BatchNorm2d(8)
        self.side, self.down = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.inner, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 5)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(self.stem(x)))
        out = self.norm(self.inner(x))
        return self.last(self.form(self, out, x).mean((2, 3)))


def _in_place(block: Block, out: Tensor, x: Tensor) -> Tensor:
    out += x
    return block.relu(out)


def _two_norms(block: Block, out: Tensor, x: Tensor) -> Tensor:
    identity = block.down(block.side(x))
    out += identity
    return block.relu(out)


def _read_again(block: Block, out: Tensor, x: Tensor) -> Tensor:
    summed = x + out
    return relu(summed) + 0.1 * summed


def _added_twice(block: Block, out: Tensor, x: Tensor) -> Tensor:
    summed = out + x
    summed = summed + summed.tanh()
    return block.relu(summed)


def _kept_and_changed(block: Block, out: Tensor, x: Tensor) -> Tensor:
    block.kept = [out]
    out += x
    return block.relu(out) + block.kept[0]


def _changed_after_relu(block: Block, out: Tensor, x: Tensor) -> Tensor:
    summed = out + x
    activated = summed.relu_()
    return activated * 2 + summed


# What each asks of the kernel in a pass.
FORMS = {
    _in_place: [(True, "relu")],
    _two_norms: [(False, "none"), (True, "relu")],
    _read_again: [(True, "relu"), (True, "none")],
    _added_twice: [(True, "none")],
    _kept_and_changed: [(True, "relu")],
    _changed_after_relu: [(True, "relu")],
    lambda block, out, x: torch.relu(torch.add(x, out)): [(True, "relu")],
    lambda block, out, x: nn.functional.relu(out.add(x), True): [(True, "relu")],
    lambda block, out, x: nn.functional.relu6(out + x): [(True, "none")],
}


def _network(form: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    example = torch.randn(2, 3, 8, 8)
    model = Block(form)
    # Without verification, which warns in a checkpoint that starts anew.
    aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 4), example_input=example, verified=False)
    return model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("form", FORMS)
def test_networks_train_as_in_float64(form: Callable[..., Tensor], made: list) -> None:
    fast = _network(form)
    slow = copy.deepcopy(fast).double()
    use_kernels(fast)
    images, labels = torch.randn(4, 3, 6, 6), torch.arange(4)
    for width in (1.0, 0.3):
        made.clear()
        for model, x in ((fast, images), (slow, images.double())):
            model.train().zero_grad()
            with aw.at_width(model, width):
                cross_entropy(model(x), labels).backward()
        assert made == FORMS[form]
        for (path, ours), exact in zip(fast.named_parameters(), slow.parameters(), strict=True):
            if exact.grad is not None:
                assert_near(ours.grad, exact.grad, 2e-4)
            else:
                assert ours.grad is None, path
        for ours, exact in zip(fast.buffers(), slow.buffers(), strict=True):
            assert_near(ours, exact.to(ours.dtype), 2e-4)


def test_only_norms_that_a_sum_alone_reads_wait() -> None:
    read_twice = _network(lambda block, out, x: block.relu(out + x) + out)
    assert aw.plan_of(read_twice).sums == []
    scaled = _network(lambda block, out, x: block.relu(out + x.mean((2, 3), keepdim=True)))
    assert aw.plan_of(scaled).sums == []
    plan = aw.plan_of(_network(_two_norms))
    assert plan.sums == ["norm", "down"]
    assert aw.Plan.from_json(plan.to_json()).sums == plan.sums
    used = use_kernels(_network(_two_norms))
    paths = {name: fast_path(used.get_submodule(name)) for name in ("first", "down", "norm")}
    assert {name: path.is_summed for name, path in paths.items()} == {
        "first": False,
        "down": True,
        "norm": True,
    }


def test_a_watched_norm_does_not_wait(made: list) -> None:
    model = use_kernels(_network(_in_place)).train()
    seen: list[type] = []
    model.norm.register_forward_hook(lambda module, given, output: seen.append(type(output)))
    model(torch.randn(2, 3, 6, 6))
    assert seen == [Tensor]
    assert made == []


def _assert_trains_as_plain_layers(form: Callable[..., Tensor]) -> None:
    model = _network(form)
    plain = copy.deepcopy(model)
    use_kernels(model)
    x = torch.randn(2, 3, 6, 6)
    for one in (model, plain):
        one.train()(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_near(ours.grad, theirs.grad, 1e-4)


def test_modes_of_gradients_count_where_operations_are_written() -> None:
    def without(block: Block, out: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = out + x
        return block.relu(out)

    _assert_trains_as_plain_layers(without)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    def recomputed(block: Block, out: Tensor, x: Tensor) -> Tensor:
        def end(x: Tensor) -> Tensor:
            return block.relu(block.down(block.side(x)) + x)

        return checkpoint(end, out.tanh() + x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    _assert_trains_as_plain_layers(recomputed)


# ---- what would be wrong is refused --------------------------------------------------------------


def _waiting() -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    inner = x * 1
    norm = kernels.deferred_norm(inner, kernels.BatchNorm(weight, bias))
    return residual_sums.waiting(inner, norm), inner


def test_a_tensor_that_changed_meanwhile_is_refused() -> None:
    waiting, x = _waiting()
    with torch.no_grad():
        x += 1
    with pytest.raises(AnywidthError, match="in place"):
        relu(waiting + torch.ones_like(x))
    waiting, x = _waiting()
    other = torch.zeros_like(x)
    summed = waiting + other
    other += 1
    with pytest.raises(AnywidthError, match="in place"):
        relu(summed)


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Passed(torch.autograd.Function):
    """The identity, which returns what it was given."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@pytest.mark.parametrize("function", [Doubled, Passed])
def test_a_gradient_does_not_end_in_silence(function: type[torch.autograd.Function]) -> None:
    waiting, _ = _waiting()
    with pytest.raises((AnywidthError, RuntimeError), match=r"kernels=False|Waiting"):
        relu(function.apply(waiting)).sum().backward()


def test_other_uses_compute_it() -> None:
    for use in (
        lambda one: one.detach(),
        lambda one: one.data,
        lambda one: one[:],
        lambda one: one.clone(),
        lambda one: torch.cat([one, one])[:2],
        lambda one: torch.stack([one])[0],
        lambda one: one + 0.0,
        lambda one: torch.add(one, torch.zeros_like(one), alpha=2),
        lambda one: torch.tensor(one.tolist()),
        lambda one: torch.from_numpy(one.detach().numpy()),
        lambda one: torch.utils.dlpack.from_dlpack(one.detach()),
        copy.copy,
    ):
        waiting, x = _waiting()
        assert waiting.shape == x.shape
        assert waiting.dtype == x.dtype
        assert waiting.requires_grad
        found = use(waiting)
        expected = batch_norm(x, None, None, torch.ones(8), torch.zeros(8), True)
        assert_near(found, expected, 1e-5)
