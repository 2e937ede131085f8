"""Parts of networks: what is refused by name, and which channels at their borders stay whole."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import anywidth as aw
from anywidth.planning.part_calls import record_calls

x = torch.randn(2, 8)


def mlp(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, 32), nn.ReLU(), nn.Linear(32, after))


class Network(nn.Module):
    """Two parts that meet in code of its own, which no export takes."""

    def __init__(self, between: str = "nothing") -> None:
        super().__init__()
        self.first, self.second, self.idle = mlp(8, 16), mlp(16, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor] | Box:
        y = self.first(x)
        if self.between == "in place":
            y.add_(1)
        elif self.between == "a view":
            y = y.view_as(y)
        elif self.between == "numpy":
            _ = y.numpy().argmax(1)
        elif self.between == "a list":
            _ = y.tolist()
        elif self.between == "weights":
            _ = self.first[0].weight.sum()
        z = self.second(y)
        z = z[z.sum(1) > z.sum(1).min()] if z.sum() > 1e9 else z  # depends on values
        if self.between == "returned in an object":
            return Box(y)
        return (z, y) if self.between == "returned" else z


class Box:
    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


def planned(model: nn.Module, parts: list[str] | str = "auto") -> aw.Plan:
    return aw.plan(model, x, parts=parts)


def test_what_goes_from_part_to_part_alone_narrows() -> None:
    plan = planned(Network(), ["first", "second"])
    assert plan.group_of("first.2").fixed is None
    assert plan.group_of("second.2").fixed is not None
    assert any("idle" in note for note in plan.notes)  # it might be given those, too
    assert planned(Network(), ["first"]).group_of("first.2").fixed is not None


@pytest.mark.parametrize("between", ["in place", "a view", "numpy", "a list", "returned"])
def test_what_anything_else_reads_stays_whole(between: str) -> None:
    model = Network(between)
    plan = planned(model, ["first", "second"])
    assert plan.group_of("first.2").fixed is not None
    assert plan.group_of("first.0").fixed is None
    aw.slimmable(model, plan, strict=True)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_is_returned_in_an_object_stays_whole() -> None:
    plan = planned(Network("returned in an object"), ["first", "second"])
    assert plan.group_of("first.2").fixed is not None


class Aside(nn.Module):
    """A part reads what another made, though it is not given it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = mlp(8, 16), mlp(16, 16), Keeping()

    def forward(self, x: Tensor) -> Tensor:
        self.third.kept = y = self.first(x)
        return self.third(self.second(y))


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(16, 4)
        self.kept = torch.zeros(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.kept[:, :4]


def test_what_a_part_reads_without_being_given_it_stays_whole() -> None:
    model = Aside()
    plan = planned(model, ["first", "second", "third"])
    assert plan.group_of("first.2").fixed is not None
    assert plan.group_of("second.2").fixed is None
    aw.slimmable(model, plan, strict=True)


def test_parts_are_found() -> None:
    with pytest.raises(aw.AnywidthError, match="auto"):
        planned(Nothing())
    assert planned(Network()).parts == ["first", "second"]
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert planned(whole).parts == []


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ("first", "list"),
        ([], "list"),
        (["frist"], "first"),
        ([3], "no such module"),
        ([""], "no such module"),
        (["first", "first.0"], "inside"),
        (["first", "first"], "inside"),
        (["idle"], "not called"),
    ],
)
def test_names_that_are_no_parts_are_refused(parts: list[str], word: str) -> None:
    with pytest.raises(aw.AnywidthError, match=word):
        aw.plan(Network(), x, parts=parts)


def test_weights_used_outside_are_refused() -> None:
    with pytest.raises(aw.AnywidthError, match=r"first\.0\.weight"):
        planned(Network("weights"), ["first"])


def test_weights_shared_across_the_border_are_refused() -> None:
    model = Network()
    model.idle = nn.Linear(32, 16)
    model.idle.weight = model.first[2].weight
    with pytest.raises(aw.AnywidthError, match=r"idle\.weight"):
        planned(model, ["first", "second"])
    assert planned(model).parts == ["second"]


def test_weights_shared_since_the_plan_are_refused() -> None:
    model = Network()
    model.idle = nn.Linear(32, 16)
    plan = planned(model, ["first"])
    model.idle.weight = model.first[2].weight
    with pytest.raises(aw.AnywidthError):
        aw.slimmable(model, plan)


def test_a_network_that_can_be_exported_narrows_in_its_parts_alone() -> None:
    model = nn.Sequential(mlp(8, 16), mlp(16, 16), mlp(16, 4))
    plan = planned(model, ["1", "2"])
    fixed = {name for name, group in plan.groups.items() if group.fixed is not None}
    assert "2.2" in fixed
    assert {"1.0", "1.2", "2.0"}.isdisjoint(fixed)
    assert all(axis is None for axis in plan.tensors["0.0.weight"])
    aw.slimmable(model, plan, strict=True)


class Counting(nn.Module):
    """A part that writes into a buffer, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(8, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x) * self.seen


def test_a_part_that_counts_its_calls_is_verified() -> None:
    model = Network()
    model.first = Counting()
    aw.slimmable(model, planned(model, ["first", "second"]), strict=True)
    assert model.first.seen == 0


def test_weights_shared_between_parts_narrow_once() -> None:
    model = Network()
    model.first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))
    model.second = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model.second[0].weight = model.first[2].weight
    aw.slimmable(model, planned(model, ["first", "second"]), strict=True)


class Lending(nn.Module):
    """A part calls a module that is not in it, and so does the network."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = nn.Linear(16, 16)
        self.part = Borrowing(self)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        return self.head(self.lent(y) if y.sum() < 1e9 else y)


class Borrowing(nn.Module):
    def __init__(self, owner: Lending) -> None:
        super().__init__()
        self.lend = [owner.lent]
        self.stem, self.last = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lend[0](self.stem(x)))


def test_a_module_called_inside_and_outside_is_refused() -> None:
    with pytest.raises(aw.AnywidthError, match=r"lent\."):
        planned(Lending(), ["part"])


class Levels(nn.Module):
    """One head for maps of several sizes, as many calls as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.head = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 5, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.stem(x)
        maps = [y, y[..., ::2, ::2], y[..., ::4, ::4]]
        found = [self.head(one) for one in maps]
        return [one[one[:, 0].amax((1, 2)) > -1e9] for one in found]


def test_a_part_called_for_several_sizes_counts_all_of_them() -> None:
    model, images = Levels().eval(), torch.randn(2, 3, 16, 16)
    plan = aw.plan(model, images, parts=["head"])
    assert plan.group_of("head.0").fixed is None
    pixels = 16 * 16 + 8 * 8 + 4 * 4
    head = pixels * (16 * 16 * 9 + 16 * 5)
    assert aw.macs(plan, 1.0) == head + 16 * 16 * 3 * 16 * 9
    before = model(images)
    aw.slimmable(model, plan, strict=True)
    for one, other in zip(before, model(images), strict=True):
        assert torch.equal(one, other)


class Chosen(nn.Module):
    """A part whose output has as many rows as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Rows(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y[0, 0] > 1e9:
            return y[:1]
        return y[y.sum(1) > -1e9]


def test_a_part_that_depends_on_values_is_named() -> None:
    with pytest.raises(aw.AnywidthError, match="part 'part'"):
        planned(Chosen(), ["part", "head"])
    model = Chosen()
    assert planned(model).parts == ["part.inner"]
    aw.slimmable(model, planned(model), strict=True)


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(8, 16)

    def forward(self, x: Tensor) -> Box:
        return Box(self.inner(x))


class Unboxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Boxing(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x).inside
        return self.head(y if y.sum() < 1e9 else -y)


def test_a_part_that_hides_its_output_is_refused() -> None:
    with pytest.raises(aw.AnywidthError, match="Box"):
        planned(Unboxing(), ["part"])
    assert planned(Unboxing()).parts == ["part.inner"]


def test_a_run_of_another_thread_is_not_recorded() -> None:
    model = Network()
    model.first.register_forward_pre_hook(lambda module, given: _run_elsewhere(model.second))
    calls = record_calls(model, (x,), ["first", "second"])
    assert [call.part for call in calls.calls] == ["first", "second"]


def _run_elsewhere(module: nn.Module) -> None:
    thread = threading.Thread(target=module, args=(torch.randn(3, 16),))
    thread.start()
    thread.join()


def test_an_example_that_does_not_run_is_named() -> None:
    with pytest.raises(aw.AnywidthError, match="does not run"):
        aw.plan(Network(), torch.randn(2, 9), parts=["first"])


def test_a_plan_of_parts_fits_no_network_without_them() -> None:
    plan = planned(Network(), ["first", "second"])
    data = plan.to_json()
    data["parts"] = ["third"]
    del data["sha256"]
    with pytest.raises(aw.AnywidthError, match="third"):
        aw.slimmable(Network(), aw.Plan.from_json(data))
    del data["parts"]  # as older versions wrote it
    assert aw.Plan.from_json(data).parts == []
