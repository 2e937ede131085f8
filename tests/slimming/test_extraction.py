"""Extracted networks are plain: own tensors, picklable, exportable, foldable."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torchvision
from agreement import assert_close, configurations, convert, stir
from layer_networks import hook_weight_norm
from torch import Tensor, nn
from torch.nn.utils import prune

import anywidth as aw
from anywidth.slimming.extraction import extract_quietly
from anywidth.slimming.norm_statistics import uncalibrated_allowed

IMAGE = (2, 3, 10, 10)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, groups=4, bias=False), nn.BatchNorm2d(24, affine=False),
        nn.ConvTranspose2d(24, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3, groups=4), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5),
    )  # fmt: skip


def storages(model: nn.Module) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_is_kept(form: torch.memory_format, fold: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    layers = (nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1),
              nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1, groups=16),
              nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8))  # fmt: skip
    model = convert(nn.Sequential(*layers), x).to(memory_format=form)
    small = extract_quietly(model, 0.5, fold=fold)
    filters = [p for p in small.parameters() if p.dim() == 4]
    assert len(filters) == 4
    for tensor in filters:
        laid_out = torch.empty(tensor.shape).to(memory_format=form)
        assert tensor.stride() == laid_out.stride(), tuple(tensor.shape)
    with aw.at_width(model, 0.5), uncalibrated_allowed(model):
        torch.testing.assert_close(small.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_tensors_are_contiguous_and_its_own(mode: bool) -> None:
    model = convert(network(), torch.randn(IMAGE)).train(mode)
    for width in (0.25, 1.0):
        small = extract_quietly(model, width)
        assert all(t.is_contiguous() for t in small.state_dict().values())
        assert not storages(small) & storages(model)
        assert small.training is mode
        sizes = [t.untyped_storage().nbytes() for t in small.parameters()]
        assert sizes == [t.numel() * t.element_size() for t in small.parameters()]


def test_extracting_does_not_change_the_model() -> None:
    x = torch.randn(IMAGE)
    model = convert(network(), x).eval()
    before = model(x)
    aw.set_width(model, 0.5)
    extract_quietly(model, 0.25, fold=True)
    assert model[0].out_channels == 8
    aw.set_width(model, 1.0)
    assert torch.equal(model(x), before)


def test_full_width_is_bit_identical() -> None:
    x = torch.randn(IMAGE)
    model = convert(network(), x)
    stir(model, [x])
    model.eval()
    assert torch.equal(model(x), aw.extract(model, 1.0)(x))


def test_requires_grad_and_training_survive() -> None:
    x = torch.randn(IMAGE)
    model = network()
    model[0].weight.requires_grad_(False)
    small = extract_quietly(convert(model, x), 0.5).train()
    assert not small[0].weight.requires_grad
    assert small[3].weight.requires_grad
    small(x).sum().backward()
    assert small[3].weight.grad.shape == (8, 1, 3, 3)


PLAIN = """
import pickle, sys
sys.modules["anywidth"] = None  # importing it from here on raises
networks, x, expected = pickle.load(sys.stdin.buffer)
import torch
for network in networks:
    with torch.no_grad():
        torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-4)
    assert type(network).__module__ == "torchvision.models.resnet", type(network)
assert not [name for name in sys.modules if name.startswith("anywidth.")]
print("plain")
"""


def test_pickles_into_a_process_without_this_library() -> None:
    x = torch.randn(1, 3, 64, 64)
    model = torchvision.models.resnet18().eval()
    aw.slimmable(model, aw.plan(model, torch.randn(2, 3, 64, 64)))
    small = [extract_quietly(model, 0.25, fold=fold).eval() for fold in (False, True)]
    with torch.no_grad():
        sent = pickle.dumps((small, x, small[0](x)))
    assert b"anywidth" not in sent
    run = subprocess.run([sys.executable, "-c", PLAIN], input=sent, capture_output=True)
    assert run.stdout == b"plain\n", run.stderr.decode()


def test_nothing_of_the_library_is_left_behind() -> None:
    small = extract_quietly(convert(network(), torch.randn(IMAGE)), 0.5)
    for module in small.modules():
        assert type(module).__module__.startswith("torch.")
        assert type(module) in vars(nn).values()
        assert not [name for name in vars(module) if "anywidth" in name or "active" in name]
        assert vars(module).keys() - vars(type(module)(*_arguments(module))).keys() == set()


def _arguments(module: nn.Module) -> tuple:
    if isinstance(module, nn.modules.conv._ConvNd):
        return 8, 8, 3
    if isinstance(module, nn.Linear):
        return 8, 8
    return (
        (8,) if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.AdaptiveAvgPool2d) else ()
    )


@pytest.mark.parametrize("fold", [False, True], ids=["plain", "folded"])
def test_exports(fold: bool) -> None:
    x = torch.randn(IMAGE)
    small = extract_quietly(convert(network(), x), 0.5, fold=fold).eval()
    exported = torch.export.export(small, (x,))
    assert_close(exported.module()(x), small(x))


def test_folding_merges_every_norm() -> None:
    x = torch.randn(IMAGE)
    model = convert(network(), x)
    assert len(aw.plan_of(model).folds) == 6
    stir(model, [x], batches=5)
    model.eval()
    with torch.no_grad(), uncalibrated_allowed(model):
        for config in configurations(model):
            folded = extract_quietly(model, config, fold=True)
            left = [m for m in folded.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            assert not left
            assert not folded.training
            with aw.at_width(model, config):
                assert_close(model(x), folded(x), 1e-4)


def test_folding_uses_calibrated_statistics() -> None:
    x = torch.randn(IMAGE)
    model = convert(network(), x).train()
    with aw.at_width(model, 0.25), torch.no_grad():
        for _ in range(5):
            model(x + torch.randn_like(x))
    model.eval()
    with aw.at_width(model, 0.25), torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            folded = aw.extract(model, 0.25, fold=True)
        assert_close(model(x), folded(x), 1e-4)


def test_norm_read_by_others_is_not_folded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16)
            self.shared, self.second = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
            self.head = nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y = y + self.norm(y)
            return self.head(self.shared(self.second(self.shared(y))))

    x = torch.randn(IMAGE)
    model = convert(Twice(), x)
    stir(model, [x])
    assert not aw.plan_of(model).folds
    model.eval()
    assert_close(model(x), aw.extract(model, 1.0, fold=True)(x), 1e-4)


def test_a_norm_with_a_hook_is_not_folded() -> None:
    x = torch.randn(IMAGE)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1))
    model[1].register_forward_hook(lambda module, arguments, output: 2 * output)
    convert(model, x)
    stir(model, [x])
    model.eval()
    assert_close(model(x), aw.extract(model, 1.0, fold=True)(x), 1e-5)


@pytest.mark.parametrize("kind", ["spectral norm", "pruned"])
def test_weights_that_hooks_compute_can_be_extracted_in_training(kind: str) -> None:
    x = torch.randn(IMAGE)
    hooked = nn.Conv2d(16, 16, 1)
    if kind == "spectral norm":
        nn.utils.spectral_norm(hooked)
    else:
        prune.l1_unstructured(hooked, "weight", 0.3)
    model = convert(
        nn.Sequential(nn.Conv2d(3, 16, 1), hooked, nn.Conv2d(16, 4, 1)), x, allow_fixed=True
    )
    loss = model.train()(x).sum()
    small = extract_quietly(model, 0.5).eval()
    loss.backward()  # through what extracting has left as it was
    model.eval()
    with aw.at_width(model, 0.5):
        assert_close(model(x), small(x), 1e-5)


class Keeping(nn.Module):
    """A hook keeps the features of a layer in a dict, as for a distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.features: dict[str, torch.Tensor] = {}
        self.stem.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: object, output: torch.Tensor) -> None:
        self.features["stem"] = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x).relu() + self.features["stem"])


def test_features_that_a_hook_keeps_can_be_extracted_in_training() -> None:
    x = torch.randn(IMAGE)
    model = convert(Keeping(), x)
    model.train()(x).sum()
    small = extract_quietly(model, 0.5).eval()
    assert model.features["stem"].grad_fn is not None
    model.eval()
    with aw.at_width(model, 0.5):
        assert_close(model(x), small(x), 1e-5)


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, hook_weight_norm])
def test_folding_bakes_weight_norm(wrap) -> None:
    x = torch.randn(IMAGE)
    model = nn.Sequential(wrap(nn.Conv2d(3, 16, 3)), nn.BatchNorm2d(16), wrap(nn.Conv2d(16, 4, 1)))
    convert(model, x)
    stir(model, [x])
    model(x).sum().backward()  # leaves a weight that carries a graph
    folded = extract_quietly(model, 0.5, fold=True)
    assert set(folded.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert type(folded[0]) is nn.Conv2d
    with aw.at_width(model.eval(), 0.5), uncalibrated_allowed(model):
        assert_close(model(x), folded(x), 1e-4)


def test_uncalibrated_extraction_warns() -> None:
    model = convert(network(), torch.randn(IMAGE))
    with pytest.warns(UserWarning, match="calibrated"):
        aw.extract(model, 0.5)


class LeakyNorm(nn.BatchNorm2d):
    """As some libraries have it: the activation is part of the norm."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(super().forward(x))


class Standardised(nn.Conv2d):
    """Scaling its weight would change nothing."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        return self._conv_forward(x, weight, self.bias)


class WithoutTheLayer(nn.Module):
    """Uses a layer's weight, and so never its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(nn.functional.conv2d(x, self.conv.weight)))


class Penalised(nn.Module):
    """Adds the size of a layer's weight, which folding would change, to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x))) + self.conv.weight.abs().mean()


UNFOLDABLE = {
    "a weight that is read again": Penalised(),
    "a weight used without its layer": WithoutTheLayer(),
    "a norm that also activates": nn.Sequential(
        nn.Conv2d(3, 16, 3), LeakyNorm(16), nn.Conv2d(16, 4, 1)
    ),
    "a weight worked out on the way": nn.Sequential(
        Standardised(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)
    ),
    "a norm over positions": nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Flatten(2), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
    ),
}


def test_a_norm_of_higher_precision_is_folded_into_the_layers_own() -> None:
    """Norms are often kept in float32 beside layers in half precision."""
    x = torch.randn(IMAGE)
    model = convert(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)), x)
    stir(model, (x,))
    aw.calibrate(model, [x], [0.5])
    model.bfloat16()[1].float()  # type: ignore[index]
    folded, plain = (aw.extract(model, 0.5, fold=fold).eval() for fold in (True, False))
    assert {parameter.dtype for parameter in folded.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(folded(x.bfloat16()), plain(x.bfloat16()), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", UNFOLDABLE)
def test_what_cannot_be_folded_is_left_as_it_is(name: str) -> None:
    model = convert(UNFOLDABLE[name], torch.randn(IMAGE), allow_fixed=True)
    x = torch.randn(IMAGE)
    stir(model, (x,))
    model.eval()
    for width in (1.0, 0.5):
        with aw.at_width(model, width), uncalibrated_allowed(model), torch.no_grad():
            expected = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small = aw.extract(model, width, fold=True)
        assert_close(small(x), expected)
