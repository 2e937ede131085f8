"""The rules: which operations let channels pass, tie them, or fix them with a reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw
from anywidth.planning.trace.rules.table import RULES
from anywidth.planning.trace.solver import Solver, Unsplittable


class Apply(nn.Module):
    """A convolution, a function, and another convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor], out: int = 16) -> None:
        super().__init__()
        self.stem, self.function, self.head = nn.Conv2d(3, 16, 1), function, nn.Conv2d(out, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.stem(x)))


def swap_halves(x: Tensor) -> Tensor:
    first, second = x.split(x.shape[1] // 2, 1)
    return torch.cat([second, first], 1)


PASSING = {
    "arithmetic": lambda x: (x * 2 + 1 - x / 3).clamp(-3, 3) ** 2,
    "softmax_over_channels": lambda x: x.softmax(1),
    "larger_of_two": lambda x: torch.max(x, 2 * x) - torch.min(x, x.square()),
    "double_transpose": lambda x: x.permute(0, 2, 3, 1).transpose(1, 3).transpose(2, 3),
    "flatten_and_back": lambda x: x.flatten(2).unflatten(2, (4, 4)),
    "pool": lambda x: nn.functional.max_pool2d(x, 2),
    "resize": lambda x: nn.functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad_positions": lambda x: nn.functional.pad(x, (1, 1, 2, 2)),
    "reflect": lambda x: nn.functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "mean_and_expand": lambda x: x.mean((2, 3), keepdim=True).expand_as(x),
    "variance": lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1).sqrt(),
    "split_halves": swap_halves,
    "first_half": lambda x: torch.cat([x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]], 1),
    "stack_and_sum": lambda x: torch.stack([x, -x * 2]).sum(0),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "flip_positions": lambda x: x.flip(3),
    "roll_positions": lambda x: x.roll((1, 1), (2, 3)),
    "select_position": lambda x: x[:, :, 0, 0][..., None, None],
    "batched_product": lambda x: (x.flatten(2) @ x.flatten(2).transpose(1, 2)).softmax(-1).matmul(
        x.flatten(2)).view_as(x),
    "gram_einsum": lambda x: torch.einsum("bchw,bchw->bc", x, x)[..., None, None],
    "einsum_with_dots": lambda x: torch.einsum("...hw,b...hw->b...wh", x[0], x),
    "einsum_without_arrow": lambda x: x + torch.einsum("bchw,b", x, x.mean((1, 2, 3))),
    "movedim": lambda x: x.movedim(1, -1).relu().moveaxis((-1, 1), (1, 2)),
    "matrix_transpose": lambda x: x.mT + x.flatten(2).mT.mT.view_as(x),
    "max_over_positions": lambda x: x.amax((2, 3), keepdim=True),
    "float": lambda x: x.float().relu().to(torch.float32),
    "normalize": nn.functional.normalize,
    "empty_slice": lambda x: torch.cat([x[:, :0], x], 1),
    "repeat": lambda x: x.mean((0, 2, 3), keepdim=True).repeat(1, 1, 1, 4) + x[..., :2].tile(1, 2),
    "repeat_channels": lambda x: x.repeat(1, 2, 1, 1).unflatten(1, (2, -1)).sum(1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1).unflatten(1, (-1, 3)).sum(2),
    "broadcast_tensors": lambda x: sum(torch.broadcast_tensors(x, x.mean(1, keepdim=True))),
    "patches": lambda x: nn.functional.fold(nn.functional.unfold(x, 2), 4, 2),
    "windows": lambda x: x.unfold(2, 2, 1).sum(-1),
    "unpool": lambda x: nn.functional.max_unpool2d(
        *nn.functional.max_pool2d(x, 2, return_indices=True), 2),
    "grid_sample": lambda x: nn.functional.grid_sample(
        x, torch.zeros(x.shape[0], 5, 5, 2), align_corners=False),
    "fourier": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[2:]),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(3, (2, 2))) * 1j).flatten(3),
    "similarity": lambda x: x * nn.functional.cosine_similarity(x, x.flip(2), 1)[:, None],
    "distance": lambda x: x * nn.functional.pairwise_distance(x.mT, x.mT + 1, keepdim=True),
    "chosen_positions": lambda x: x.index_select(2, torch.tensor([1, 0])),
    "mean_and_variance": lambda x: torch.div(*torch.var_mean(x, 1, keepdim=True)) + x,
    "masks": lambda x: x * ((x < 1) & (x > -1) | x.isfinite()),
    "difference": lambda x: x * nn.functional.mse_loss(x, x.flip(2)),
    "eighths": lambda x: torch.cat([x[:, x.shape[1] // 8 :], x[:, : x.shape[1] // 8]], 1),
    "tensordot": lambda x: x + torch.tensordot(x, x.mean((0, 2, 3)), ([1], [0]))[:, None],
    "squeeze": lambda x: x.mean((2, 3), keepdim=True).squeeze(-1).squeeze(-1)[..., None, None],
}  # fmt: skip

FIXING = {
    "sort": (lambda x: x.sort(1).values, "sort"),
    "flip_channels": (lambda x: x.flip(1), "flip"),
    "roll_flat": (lambda x: x.roll(1), "roll"),
    "pad_channels": (lambda x: nn.functional.pad(x, (0, 0, 0, 0, 0, 4))[:, :16], "pad"),
    "odd_slice": (lambda x: nn.functional.pad(x[:, :11], (0, 0, 0, 0, 0, 5)), "11 of 16"),
    "unequal_split": (lambda x: torch.cat(x.split([5, 11], 1)[::-1], 1), "unequal"),
    "index": (lambda x: x[:, torch.arange(15, -1, -1)], "index"),
    "unbind": (lambda x: torch.stack(x.unbind(1), 1), "unbind"),
    "outer_product": (
        lambda x: (
            torch.einsum("bchw,bdhw->bcdhw", x, x).flatten(1, 2).unflatten(1, (16, 16)).sum(2)
        ),
        "flatten",
    ),
    "first_channel": (lambda x: x * x[:, :1], "1 of 16"),
    "uneven_groups": (
        lambda x: nn.functional.group_norm(torch.cat([x, x[:, : x.shape[1] // 2]], 1), 2)[
            :, : x.shape[1]
        ],
        "unit",
    ),
    "more_often": (
        lambda x: x[:, :4].repeat(1, x.shape[1] // 4, 1, 1),
        "4 of 16",
    ),
    "constant": (lambda x: x + torch.arange(16.0).view(1, 16, 1, 1), "constant"),
}


@pytest.mark.parametrize("name", PASSING)
def test_channels_pass(name: str) -> None:
    x = torch.randn(2, 3, 4, 4)
    model = convert(Apply(PASSING[name]), x)
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    assert_agrees(model, x)


@pytest.mark.parametrize("name", FIXING)
def test_channels_are_fixed_and_the_plan_says_why(name: str) -> None:
    function, reason = FIXING[name]
    x = torch.randn(2, 3, 4, 4)
    plan = aw.plan(Apply(function), x)
    assert plan.elastic_layers() == (0, 2)
    assert any(reason in (group.fixed or "") for group in plan.groups.values())
    model = aw.slimmable(Apply(function), plan, strict=True, allow_fixed=True)
    assert_agrees(model, x)


def test_every_rule_is_for_an_operation_of_torch() -> None:
    for module in ("torchvision.ops", "transformers.integrations.moe"):  # they define some
        importlib.import_module(module)
    names = {str(schema.name).removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    missing = {name for name in RULES if name not in names and f"{name}_" not in names}
    assert not missing


# ---- the solver --------------------------------------------------------------------------------


def test_solver_merges_with_multiplicities() -> None:
    solver = Solver()
    flat, heads = solver.new(12), solver.new(3)
    solver.unify(flat, tuple((v, 4) for v, _ in heads), "")
    assert solver.pieces(flat) == tuple((v, 4) for v, _ in solver.pieces(heads))
    assert solver.size(solver.pieces(flat)) == 12


def test_solver_cuts_where_the_other_axis_does() -> None:
    solver = Solver()
    whole, left, right = solver.new(10), solver.new(4), solver.new(6)
    solver.unify(whole, left + right, "")
    assert solver.pieces(whole) == solver.pieces(left) + solver.pieces(right)


def test_solver_fixes_what_meets_a_constant() -> None:
    solver = Solver()
    axis, other = solver.new(8), solver.new(8)
    solver.unify(axis, other, "")
    assert solver.unify(other, None, "for a reason") is None
    assert solver.fixed(solver.pieces(axis)[0][0]) == "for a reason"


def test_solver_does_not_cut_a_unit() -> None:
    solver = Solver()
    axis = tuple((v, 4) for v, _ in solver.new(3))
    before = solver.pieces(axis)
    with pytest.raises(Unsplittable):
        solver.cut(axis, [6, 6])
    assert solver.pieces(axis) == before
    assert [solver.size(part) for part in solver.cut(axis, [4, 8])] == [4, 8]


def test_solver_gives_up_on_units_that_do_not_fit() -> None:
    solver = Solver()
    threes, twos = solver.new(2), solver.new(3)
    first = tuple((v, 3) for v, _ in threes) + solver.new(1)
    second = tuple((v, 2) for v, _ in twos) + solver.new(1)
    solver.unify(first, second, "odd")
    sizes = [solver.size(solver.pieces(axis)) for axis in (first, second)]
    assert sizes == [7, 7]
