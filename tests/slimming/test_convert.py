"""Converting in place, setting widths, and what must not change by either."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from agreement import assert_agrees, assert_close, convert
from torch import Tensor, nn

import anywidth as aw
from anywidth.slimming import convert as convert_module
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import uncalibrated_allowed
from anywidth.slimming.state import MOST_CONFIGS, MOST_WIDTHS, state_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, 16, 1, 1) + 0.5)
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.relu(self.norm(self.conv(x)))


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(16, 5))  # fmt: skip


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 10, 10)


def snapshot(model: nn.Module) -> list:
    """Everything a conversion could have touched."""
    return [
        (path, type(module), dict(module.__dict__), dict(module._parameters),
         dict(module._buffers), module.training)
        for path, module in model.named_modules()
    ]  # fmt: skip


def assert_untouched(model: nn.Module, before: list) -> None:
    after = snapshot(model)
    assert [entry[:2] for entry in after] == [entry[:2] for entry in before]
    for old, new in zip(before, after, strict=True):
        assert old[2].keys() == new[2].keys()
        assert all(old[2][k] is new[2][k] or old[2][k] == new[2][k] for k in old[2])
        assert all(old[3][k] is new[3][k] for k in old[3])
        assert all(old[4][k] is new[4][k] for k in old[4])
        assert old[5] == new[5]


def test_planning_changes_nothing(x: Tensor) -> None:
    model = network()
    before, values = snapshot(model), copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    aw.plan(model, x)
    assert_untouched(model, before)
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_conversion_is_in_place_and_keeps_every_parameter(x: Tensor) -> None:
    model = network().eval()
    parameters, names, before = list(model.parameters()), list(model.state_dict()), model(x)
    assert convert(model, x) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), before)
    assert isinstance(model[1], Block)
    assert isinstance(model[1].conv, nn.Conv2d)


def test_full_width_trains_as_before(x: Tensor) -> None:
    plain = network()
    model = convert(copy.deepcopy(plain), x)
    aw.set_width(model, 0.5)
    aw.set_width(model, 1.0)
    for one in (plain, model):
        one.train()(x).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_checkpoints_load_either_way_at_any_width(x: Tensor) -> None:
    plain, model = network(), convert(network(), x)
    aw.set_width(model, 0.5)
    model.load_state_dict(plain.state_dict(), strict=True)
    other = network()
    other.load_state_dict(model.state_dict(), strict=True)
    for a, b in zip(plain.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_verification_leaves_mode_values_and_random_state(x: Tensor) -> None:
    model = network()
    model[1].eval()
    plan = aw.plan(model, x)
    values, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    aw.slimmable(model, plan)
    assert (model.training, model[1].training) == (True, False)
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("failing", ["verify", "track_statistics", "_apply"])
def test_failed_conversion_undoes_itself(x: Tensor, monkeypatch, failing: str) -> None:
    model = network().eval()
    plan, result = aw.plan(model, x), model(x)
    before = snapshot(model)
    real = getattr(convert_module, failing)

    def fail_after(*args, **kwargs) -> None:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, failing, fail_after)
    with pytest.raises(KeyboardInterrupt):
        aw.slimmable(model, plan)
    assert_untouched(model, before)
    assert torch.equal(model(x), result)
    monkeypatch.undo()
    assert_agrees(aw.slimmable(model, plan), x)


def test_parent_of_a_converted_part(x: Tensor) -> None:
    model = network()
    convert(model[1], torch.randn(2, 16, 8, 8), allow_fixed=True)
    with pytest.raises(aw.AnywidthError, match="already"):
        aw.plan(model, x)
    with pytest.raises(aw.AnywidthError, match="already"):
        aw.slimmable(model, example_input=x)


def test_parent_of_layers_converted_elsewhere(x: Tensor) -> None:
    first = convert(network(), x)
    second = nn.Sequential(first[0], nn.Conv2d(16, 4, 1))
    with pytest.raises(aw.AnywidthError, match="already"):
        aw.slimmable(second, example_input=x)
    with aw.at_width(first, 0.5), uncalibrated_allowed(first):
        assert_close(first(x), extract_quietly(first, 0.5)(x), 1e-5)


def test_buffers_that_evaluation_updates_are_as_before(x: Tensor) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            with torch.no_grad():
                self.mean.add_((x.mean((0, 2, 3)) - self.mean) / self.seen)
            return x - self.mean[:, None, None]

    model = nn.Sequential(nn.Conv2d(3, 16, 1), Counting(), nn.Conv2d(16, 4, 1))
    aw.slimmable(model, example_input=x)
    aw.latency(model, 0.5, repeats=2)
    assert model[1].seen == 0
    assert not model[1].mean.any()


def test_at_width_restores_on_exceptions(x: Tensor) -> None:
    model = convert(network(), x)
    aw.set_width(model, 0.5)
    with pytest.raises(RuntimeError), aw.at_width(model, 0.25):
        model(torch.randn(2, 99, 10, 10))
    assert model[0].out_channels == 8
    with pytest.raises(aw.AnywidthError), aw.at_width(model, 7):
        pass
    assert model[0].out_channels == 8
    with aw.at_width(model, 0.25), aw.at_width(model, 1.0):
        assert model[0].out_channels == 16
    assert model[0].out_channels == 8


def test_copies_are_independent(x: Tensor) -> None:
    model = convert(network(), x).eval()
    aw.set_width(model, 0.5)
    with torch.no_grad(), uncalibrated_allowed(model):
        model(x)
    other = copy.deepcopy(model)
    aw.set_width(other, 0.25)
    assert (model[0].out_channels, other[0].out_channels) == (8, 4)
    with torch.no_grad():
        other[0]._parameters["weight"].zero_()
    assert model[0]._parameters["weight"].any()
    assert_agrees(other, x)
    assert_agrees(model, x)
    assert state_of(other).plan is not state_of(model).plan


def test_shallow_copies_and_checkpoints_at_a_narrow_width(x: Tensor) -> None:
    model = convert(network(), x).eval()
    aw.set_width(model, 0.5)
    shallow = copy.copy(model[0])
    assert type(shallow) is type(model[0])
    assert shallow.weight.data_ptr() == model[0].weight.data_ptr()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    network().load_state_dict(torch.load(file, weights_only=True))


def test_model_to_moves_statistics_too(x: Tensor) -> None:
    model = convert(network(), x).train()
    with aw.at_width(model, 0.25):
        model(x)
    model.to(torch.float64).eval()
    with aw.at_width(model, 0.25), torch.no_grad():
        assert model(x.double()).dtype == torch.float64
        twin = aw.extract(model, 0.25)
        assert_close(model(x.double()), twin(x.double()), 1e-10)
    model.to("meta")
    with aw.at_width(model, 0.25):
        assert model(x.double().to("meta")).is_meta


def test_a_network_without_memory_is_converted_and_filled_later(x: Tensor) -> None:
    """Its verification compares shapes, for there are no values."""
    with torch.device("meta"):
        model = network()
    convert(model, x.to("meta"))
    twin = convert(network(), x)
    model.to_empty(device="cpu").load_state_dict(twin.state_dict())
    model.eval()
    assert torch.equal(model(x), twin.eval()(x))
    assert_agrees(model, x)


def test_a_network_cast_after_its_plan_was_made(x: Tensor) -> None:
    model = network()
    plan = aw.plan(model, x)
    aw.slimmable(model.double(), plan, strict=True)
    with uncalibrated_allowed(model):
        assert_close(model(x.double()), extract_quietly(model, 1.0)(x.double()))


def test_range_below_full_width(x: Tensor) -> None:
    model = network().eval()
    before = model(x)
    convert(model, x, aw.WidthRange(0.25, 0.75, 2))
    assert torch.equal(model(x), before)
    with pytest.raises(aw.AnywidthError, match="range"):
        aw.set_width(model, 1.0)
    with aw.at_width(model, 0.5):
        pass
    assert torch.equal(model(x), before)
    assert_agrees(model, x)


def test_remembered_widths_are_bounded(x: Tensor) -> None:
    layers = [nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)]
    model = convert(nn.Sequential(*layers, nn.Conv2d(16, 4, 1)), x, aw.WidthRange(0.05, 1.0, 1))
    plan, state = aw.plan_of(model), state_of(model)
    first, second, third = (group.name for group in plan.elastic())
    for i in range(2 * MOST_CONFIGS):
        channels = {first: 1 + i % 16, second: 1 + i // 16 % 16, third: 1 + i // 256}
        aw.set_width(model, plan.full.replace(channels))
    assert state._layout._values_at.cache_info().currsize <= MOST_CONFIGS
    for i in range(MOST_WIDTHS + 10):
        aw.set_width(model, 0.05 + 0.0002 * i)
    assert state._resolve.cache_info().currsize <= MOST_WIDTHS
    assert_agrees(model, x)


def test_shared_layers_are_narrowed_once(x: Tensor) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
            self.two = nn.Conv2d(16, 16, 3, padding=1)
            self.two.weight = self.one.weight
            self.again, self.head = self.one, nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.again(self.two(self.one(self.stem(x)))))

    model = convert(Shared(), x)
    assert_agrees(model, x)
    small = extract_quietly(model, 0.5)
    assert small.one.weight is small.two.weight
    assert small.again is small.one


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_at_three_widths(x: Tensor, backend: str) -> None:
    """The whole network is one graph at each width, and a width seen before needs no new one."""
    torch._dynamo.reset()
    model = convert(network(), x).eval()
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad(), uncalibrated_allowed(model):
        for width in (1.0, 0.5, 0.25, 0.5, 1.0):
            with aw.at_width(model, width):
                assert_close(compiled(x), model(x))
    assert graphs.frame_count == 3
    torch._dynamo.reset()


def test_functional_call_and_vmap_see_the_width() -> None:
    model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4))
    rows = torch.randn(3, 4)
    stacked = {name: torch.stack([p, p * 2]) for name, p in model.named_parameters()}
    with aw.at_width(model, 0.5), torch.no_grad():
        model(rows)
        both = torch.vmap(lambda p: torch.func.functional_call(model, p, (rows,)))(stacked)
        assert_close(both[0], model(rows))
        assert_close(model(rows), extract_quietly(model, 0.5)(rows))


def test_a_plan_that_names_a_missing_module_leaves_the_network_as_it_was() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    plan = aw.plan(model, x)
    plan.attributes.append(replace(plan.attributes[0], module="gone"))
    expected = model.eval()(x)
    with pytest.raises(aw.AnywidthError, match="gone"):
        aw.slimmable(model, plan)
    assert torch.equal(model(x), expected)
    aw.slimmable(model, aw.plan(model, x))


class MovingMean(nn.Module):
    """Assigns its buffer anew, as some libraries do, instead of writing into it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + x.mean((0, 2, 3)).detach()
        return x - self.mean.view(-1, 1, 1)


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 8, 1)
        self.centre, self.head = MovingMean(24), nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.centre(torch.cat([self.left(x), self.right(x)], 1)))


def test_a_buffer_that_forward_assigns_changes_where_it_is_active(x: Tensor) -> None:
    model = convert(TwoBranches(), x).train()
    with aw.at_width(model, 0.5):
        model(x)
    mean = model.state_dict()["centre.mean"]
    active = torch.zeros(24, dtype=torch.bool)
    active[:8] = active[16:20] = True
    assert mean.shape == (24,)
    assert torch.equal(mean != 0, active)
    model(x)
    assert (model.centre.mean != 0).all()
    model.centre.mean = torch.zeros(24)
    assert not model.state_dict()["centre.mean"].any()


class OwnNames(nn.Module):
    """A layer whose author likes the names that this library likes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self._scale_factor, self._active_fn = 2.0, "relu"
        self._views, self._bank, self._label = [3.0], {"kept": 1}, "a label"
        self._config = {"divide": True}

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(nn.functional, self._active_fn)(nn.functional.linear(x, self.weight))
        return y * self._scale_factor / (self._views[0] if self._config["divide"] else 1.0)


def test_attributes_of_the_users_own_are_left_alone() -> None:
    rows = torch.randn(3, 4)
    model = nn.Sequential(OwnNames(4, 16), nn.BatchNorm1d(16), OwnNames(16, 16), OwnNames(16, 2))
    before = [set(vars(module)) for module in model.modules()]
    convert(model, rows)
    assert_agrees(model, rows)
    aw.calibrate(model.double(), [rows.double()], [0.5])
    small = aw.extract(model, 0.5)
    assert [set(vars(module)) for module in small.modules()] == before
    assert model[0]._bank == small[0]._bank == {"kept": 1}


def test_every_owner_of_a_tied_weight_shows_its_width() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model = aw.slimmable(Tied(), example_input=torch.randint(20, (2, 5)))
    small = aw.extract(model, 0.5)
    assert (small.embed.embedding_dim, small.head.in_features) == (16, 16)
    assert small.head.weight is small.embed.weight


def test_networks_in_wrappings(x: Tensor) -> None:
    model = convert(network(), x)
    with pytest.raises(aw.AnywidthError, match="_orig_mod"):
        aw.set_width(torch.compile(model), 0.5)
    traced = torch.fx.symbolic_trace(network().eval())
    convert(traced, x)
    with aw.at_width(traced, 0.5), uncalibrated_allowed(traced):
        assert_close(traced(x), extract_quietly(traced, 0.5)(x), 1e-5)


def test_the_range_is_the_plans_own_if_none_is_given(x: Tensor) -> None:
    """A plan of a converted network, saved and read again, converts as it did before."""
    widths = aw.WidthRange(0.5, 1.0, 4)
    plan = aw.plan_of(convert(network(), x, widths))
    again = aw.slimmable(network(), aw.Plan.from_json(plan.to_json()))
    assert aw.plan_of(again).widths == widths
    assert aw.plan_of(aw.slimmable(network(), aw.plan(network(), x))).widths == aw.WidthRange()
