"""What conversion keeps on a module: one record, under one name that is no one else's."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from tiny_networks import batches_of, converted, shaken, tiny
from torch import Tensor, nn

import anywidth as aw
from anywidth.planning.cuts import RECORD, is_converted
from anywidth.slimming.layers import drop_fast_paths
from anywidth.slimming.switchable import add_private_affine
from anywidth.training.gpu.fast_convolutions import pointwise_forward
from anywidth.training.gpu.fast_norms import join, norm_forward
from anywidth.training.gpu.fast_paths import give

# Names under which this library, or an author, may keep things on a norm.
NAMES = (
    *("_bank", "_config", "_is_full", "_label", "_lenient", "_switches", "_plain_class", "_views"),
    *("_slow_class", "_slow_forward", "_activation", "_read_by", "_norm_after", "_awaits"),
)


class OwnNorm(nn.BatchNorm2d):
    """A norm whose author likes names that a library might."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        for name in NAMES:
            setattr(self, name, f"the author's {name}")

    def forward(self, x: Tensor) -> Tensor:
        assert all(getattr(self, name) == f"the author's {name}" for name in NAMES)
        return super().forward(x)


def own_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), OwnNorm(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), OwnNorm(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def calibrated(model: nn.Module | None = None) -> nn.Module:
    model = shaken() if model is None else model
    aw.calibrate(model, batches_of([16, 16]), [0.25, 0.5, 1.0])
    return model.eval()


def outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    found = []
    for width in (0.25, 0.5, 1.0):
        with aw.at_width(model, width), torch.no_grad():
            found.append(model(images))
    return found


def with_fast_paths() -> nn.Module:
    """On a CPU every layer then goes its slow way, whatever forward it was given."""
    model = calibrated()
    give(model[1], norm_forward)
    give(model[4], pointwise_forward)
    join(model[1], model[2])
    return model


def with_switches() -> nn.Module:
    model = shaken()
    add_private_affine(model, [0.25, 0.5])
    return calibrated(model)


KINDS = {"calibrated": calibrated, "fast paths": with_fast_paths, "switches": with_switches}


def test_no_attribute_of_a_users_module_is_overwritten() -> None:
    images = torch.randn(4, 3, 8, 8)
    model = own_network()
    before = [set(vars(module)) for module in model.modules()]
    aw.slimmable(model, example_input=images)
    give(model[1], norm_forward)
    added = [set(vars(m)) - names for m, names in zip(model.modules(), before, strict=True)]
    assert set.union(*added) == {RECORD}
    aw.calibrate(model, [images], [0.5, 1.0])
    model.eval()
    with aw.at_width(model, 0.5), torch.no_grad():
        sliced = model(images)
    small = aw.extract(model, 0.5).eval()
    torch.testing.assert_close(small(images), sliced)
    assert [set(vars(module)) for module in small.modules()] == before


def test_a_name_that_is_taken_is_not_given_to_private_scales() -> None:
    model = tiny()
    model[1].private_affine = "the author's"
    with pytest.raises(aw.AnywidthError, match="private_affine"):
        add_private_affine(converted(model), [0.25, 0.5])
    assert model[1].private_affine == "the author's"


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_layer_prints_as_what_it_is(kind: str) -> None:
    model = KINDS[kind]()
    names = [type(layer).__name__ for layer in model]
    assert names[:3] == ["SlimmableConv2d", "SlimmableBatchNorm2d", "ReLU"]
    assert names[-1] == "SlimmableLinear"
    assert repr(model[0]).startswith("SlimmableConv2d(1, 16, kernel_size=(3, 3)")
    assert "nn.modules.conv.SlimmableConv2d" in repr(type(model[0]))
    assert isinstance(model[0], nn.Conv2d)
    small = aw.extract(model, 0.5)
    assert not is_converted(small)
    assert [type(layer) for layer in small] == [type(layer) for layer in tiny()]
    assert repr(small[0]).startswith("Conv2d(1, 8, ")


class RootScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 16, 1), nn.Conv2d(16, 4, 1)
        self.scale = nn.Parameter(torch.randn(1, 16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale)


def test_a_graph_of_torch_fx_that_holds_a_parameter_is_extracted() -> None:
    """`torch.fx` copies a graph in its own way, and knows its classes by their name."""
    graph = converted(torch.fx.symbolic_trace(RootScale()))
    images = batches_of([2])[0]
    small = aw.extract(graph, 0.5)
    assert not is_converted(small)
    with aw.at_width(graph, 0.5):
        torch.testing.assert_close(small(images), graph(images))


def test_the_record_is_in_no_checkpoint() -> None:
    assert list(shaken().state_dict()) == list(tiny().state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_run_at_widths_of_their_own(kind: str) -> None:
    model, images = KINDS[kind](), batches_of([4], seed=5)[0]
    expected = outputs(model, images)
    twin = copy.deepcopy(model)
    aw.set_width(twin, 0.25)
    for one, other in zip(expected, outputs(model, images), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(expected, outputs(twin, images), strict=True):
        assert torch.equal(one, other)
    drop_fast_paths(twin)
    for one, other in zip(expected, outputs(twin, images), strict=True):
        assert torch.equal(one, other)
    assert [type(layer).__name__ for layer in twin] == [type(layer).__name__ for layer in model]


ELSEWHERE = """
import pickle, sys
import torch
import anywidth as aw
model, images, expected = pickle.load(sys.stdin.buffer)
assert type(model[0]).__name__ == "SlimmableConv2d"
for width, output in zip((0.25, 0.5, 1.0), expected, strict=True):
    with aw.at_width(model, width), torch.no_grad():
        assert torch.equal(model(images), output)
assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0]
aw.extract(model, 0.5)
print("the same")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_into_another_process(kind: str) -> None:
    """As spawned workers of a data loader, or of a search, are given their network."""
    model, images = KINDS[kind](), batches_of([4], seed=5)[0]
    sent = pickle.dumps((model, images, outputs(model, images)))
    run = subprocess.run([sys.executable, "-c", ELSEWHERE], input=sent, capture_output=True)
    assert run.stdout == b"the same\n", run.stderr.decode()


@pytest.mark.parametrize("training", [False, True])
def test_five_widths_compile_to_five_graphs(training: bool) -> None:
    """The numbers in a record are plain ones: nothing about them breaks or repeats a graph."""
    torch._dynamo.reset()
    model, images = converted(), batches_of([4])[0]
    widths = [0.25, 0.5, 0.75, 1.0, aw.plan_of(model).resolve(0.5).replace({"0": 12})]
    aw.calibrate(model, [images], widths)
    model.train(training)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for width in [*widths, *widths]:
        with aw.at_width(model, width):
            compiled(images)
    assert graphs.frame_count == 5
    torch._dynamo.reset()
