"""Whole networks on the kernels against the same networks on PyTorch's layers, in float64."""

import copy

import pytest
import torch
from interpreter import assert_near
from torch import Tensor, nn

import anywidth as aw
from anywidth.errors import AnywidthError
from anywidth.models.building import conv_norm
from anywidth.models.mobilenet_v2 import InvertedResidual
from anywidth.slimming.layers import drop_fast_paths
from anywidth.training.gpu import kernels
from anywidth.training.gpu.fast_layers import use_kernels
from anywidth.training.gpu.fast_paths import fast_path, slowly
from anywidth.training.gpu.kernels import batch_norm_small

WIDTHS = (1.0, 0.3)


class SharedActivations(nn.Module):
    """Residual blocks as they are often written: one activation module for all places."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(4))
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.pointwise = nn.Conv2d(16, 16, 1, bias=False)
        self.other = nn.Conv2d(16, 16, 1, bias=False)
        self.activation = activation
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norms[0](self.first(x)))
        # Both are normalised before either is activated, and one of them is read twice.
        inner, other = self.norms[1](self.depthwise(x)), self.norms[2](self.other(x))
        inner, twice = self.activation(inner), self.activation(other) + 0.1 * other
        x = self.activation(x + self.norms[3](self.pointwise(inner)) + twice)
        return self.last(x.mean((2, 3)))


def _converted(model: nn.Module) -> nn.Module:
    example = torch.randn(2, 3, 8, 8)
    return aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 4), example_input=example)


def _networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    # The first blocks of MobileNet v2 with fewer channels, which the interpreter takes long for.
    inverted = nn.Sequential(
        conv_norm(3, 8, 3, activation=nn.ReLU6),
        InvertedResidual(8, 12, 1, expansion=1),
        InvertedResidual(12, 16, 1, expansion=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return {
        "shared SiLU": SharedActivations(nn.SiLU()),
        "shared ReLU in place": SharedActivations(nn.ReLU(inplace=True)),
        "inverted residuals": nn.Sequential(inverted, nn.Linear(16, 5)),
    }


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tensors whose norm was left to a convolution, however few their pixels."""
    monkeypatch.setattr(batch_norm_small, "MOST_PIXELS", 0)
    shapes: list[tuple[int, ...]] = []
    whole = kernels.deferred_norm

    def watched(x: Tensor, norm: kernels.BatchNorm, *work: object) -> object:
        if norm.activation != "none":  # otherwise it waits for a sum
            shapes.append(tuple(x.shape))
        return whole(x, norm, *work)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "deferred_norm", watched)
    return shapes


@pytest.mark.parametrize("name", _networks())
def test_gradients_are_those_of_plain_layers(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("name", _networks())
def test_gradients_are_those_of_plain_layers_over_many_pixels(name: str, deferred: list) -> None:
    _compare(name)
    # The stem's norm, and the one after the first expansion, at both widths.
    assert len(deferred) == (4 if name == "inverted residuals" else 0)


def _compare(name: str) -> None:
    fast = _converted(_networks()[name]).to(memory_format=torch.channels_last)
    slow = copy.deepcopy(fast).double()
    use_kernels(fast)
    assert any(fast_path(module) is not None for module in fast.modules())
    images, labels = torch.randn(4, 3, 6, 6), torch.arange(4)
    for width in WIDTHS:
        for model, x in ((fast, images), (slow, images.double())):
            model.train().zero_grad()
            with aw.at_width(model, width):
                nn.functional.cross_entropy(model(x), labels).backward()
        for (path, ours), exact in zip(fast.named_parameters(), slow.parameters(), strict=True):
            assert exact.grad is not None, path
            assert_near(ours.grad, exact.grad, 2e-4)
        for ours, exact in zip(fast.buffers(), slow.buffers(), strict=True):
            assert_near(ours, exact.to(ours.dtype), 2e-4)


def test_pictures_take_their_kernel_unless_they_need_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_norm_small, "MOST_PIXELS", 0)
    measured: list[bool] = []
    whole = kernels.stem_conv2d_with_statistics

    def watched(*arguments: object) -> object:
        made, partial = whole(*arguments)  # type: ignore[arg-type]
        measured.append(partial is not None)
        return made, partial

    monkeypatch.setattr(kernels, "stem_conv2d_with_statistics", watched)
    model = use_kernels(_converted(SharedActivations(nn.SiLU())))
    images = torch.randn(2, 3, 8, 8)
    with aw.at_width(model, 0.5):
        expected = slowly(model.first, images)
        assert_near(model.first(images), expected, 2e-6)
        model(images)
    model.eval()(images)
    assert measured == [True, True, False]  # in evaluation nobody asks for statistics
    images.requires_grad_()
    with aw.at_width(model, 0.5):
        model.train()(images).sum().backward()
    assert len(measured) == 3
    assert images.grad is not None


def test_only_activations_that_read_a_norm_alone_are_joined() -> None:
    model = _converted(SharedActivations(nn.SiLU()))
    joined = [("norms.0", "activation"), ("norms.1", "activation")]
    assert aw.plan_of(model).activations == joined
    use_kernels(model)
    paths = [fast_path(norm) for norm in model.norms]
    assert [path.activation is not None for path in paths] == [True, True, False, False]
    drop_fast_paths(model)
    assert type(model.activation) is nn.SiLU
    assert not any(fast_path(norm) for norm in model.norms)


class Between(nn.Module):
    """Batch norm and activation with something between them, or beside, that training alone has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.norm, self.activation = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()
        self.between = nn.Dropout2d(0.5) if kind == "dropout" else nn.Identity()
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        normalised = self.norm(self.first(x))
        changed = self.between(normalised)
        if self.training and self.kind == "scaled":
            changed = changed * 1.5
        activated = self.activation(changed)
        if self.training and self.kind == "read":
            activated = activated + normalised.tanh()
        return self.last(activated.mean((2, 3)))


@pytest.mark.parametrize("kind", ["dropout", "scaled", "read", "nothing"])
def test_activations_are_joined_where_training_reads_the_norm_alone(kind: str) -> None:
    model = _converted(Between(kind))
    assert len(aw.plan_of(model).activations) == (kind == "nothing")
    plain = copy.deepcopy(model).train()
    use_kernels(model.train())
    x = torch.randn(4, 3, 6, 6)
    for seed in range(3):
        torch.manual_seed(seed)
        found = model(x)
        torch.manual_seed(seed)
        assert_near(found, plain(x), 1e-5)


def test_a_joined_activation_still_works_on_anything_else() -> None:
    model = _converted(SharedActivations(nn.SiLU()))
    use_kernels(model)
    x = torch.randn(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    plain = nn.functional.silu(x)
    assert torch.equal(model.activation(x), plain)
    normalised = model.norms[0].train()(x)
    activated = model.activation(normalised)
    assert activated is normalised
    assert torch.equal(model.activation(activated), nn.functional.silu(activated))


@pytest.mark.parametrize("training", [False, True])
def test_a_network_with_kernels_still_compiles_and_exports(training: bool) -> None:
    model = _converted(SharedActivations(nn.ReLU()))
    use_kernels(model)
    model.train(training)
    x = torch.randn(2, 3, 8, 8)
    torch._dynamo.reset()
    assert_near(torch.compile(model, backend="eager", fullgraph=True)(x), model(x), 1e-5)
    exported = torch.export.export(model, (x,)).module()
    assert_near(exported(x), model(x), 1e-5)


def test_a_network_with_kernels_still_gives_gradients_of_each_sample() -> None:
    model = _converted(SharedActivations(nn.ReLU()))
    use_kernels(model)
    model.eval()

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (sample[None],)).square().sum()

    x, parameters = torch.randn(3, 3, 8, 8), dict(model.named_parameters())
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    loss(parameters, x[1]).backward()
    for name, parameter in model.named_parameters():
        assert_near(found[name][1], parameter.grad, 1e-5)


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised on the way."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class LeakyNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(super().forward(x))


class Scaled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 1),
        LeakyNorm(16),
        Standardised(16, 16, 1, bias=False),
        LeakyNorm(16),
        Scaled(16, 16, 3, padding=1, groups=16, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
    ]
    model = _converted(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 5))).train()
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    expected = model(x)
    use_kernels(model)
    assert_near(model(x), expected, 1e-4)


@pytest.mark.parametrize("place", [1, 2])
def test_hooks_see_what_they_would_without_kernels(place: int) -> None:
    """They may also hand on another tensor, which must not be activated twice."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.SiLU()
    model = _converted(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 5))).train()
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    expected = model(x)
    use_kernels(model)
    model[place].register_full_backward_hook(lambda *_: None)
    assert_near(model(x), expected, 1e-4)


class Separable(nn.Module):
    """Pointwise and depthwise convolutions in a row, with something between that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 16, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.activations = nn.ModuleList(nn.ReLU6() for _ in range(2))
        self.depthwise = nn.Conv2d(16, 16, 3, 2, 1, groups=16, bias=False)
        self.last = nn.Linear(16, 5)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.activations[0](self.norms[0](self.expand(x)))
        if self.factor == 0.0:
            return self.last(x.mean((2, 3)))
        if self.factor != 1.0:
            x = x * self.factor
        x = self.activations[1](self.norms[1](self.depthwise(x)))
        return self.last(x.mean((2, 3)))


def test_a_depthwise_convolution_does_the_norm_before_it(deferred: list) -> None:
    model = _converted(Separable()).train()
    assert aw.plan_of(model).prologues == [("norms.0", "activations.0", "depthwise")]
    plain = copy.deepcopy(model)
    use_kernels(model)
    x = torch.randn(4, 3, 8, 8)
    assert_near(model(x), plain(x), 1e-5)
    assert deferred == [(4, 16, 8, 8)]
    assert_near(copy.deepcopy(model)(x), copy.deepcopy(plain)(x), 1e-5)
    assert_near(model.eval()(x), plain.eval()(x), 1e-5)
    drop_fast_paths(model)
    assert_near(model.train()(x), plain.train()(x), 1e-5)
    assert len(deferred) == 2


@pytest.mark.parametrize("path", ["norms.0", "activations.0", "depthwise", "norms.1"])
def test_a_norm_is_not_left_to_a_convolution_where_hooks_watch(deferred: list, path: str) -> None:
    model = _converted(Separable()).train()
    plain = copy.deepcopy(model)
    use_kernels(model)
    seen: list[Tensor] = []
    model.get_submodule(path).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    x = torch.randn(4, 3, 8, 8)
    assert_near(model(x), plain(x), 1e-5)
    expected: list[Tensor] = []
    plain.get_submodule(path).register_forward_pre_hook(lambda _, given: expected.append(given[0]))
    plain(x)
    assert_near(seen[0], expected[0], 1e-5)


def test_a_norm_that_was_left_to_a_convolution_is_never_lost(deferred: list) -> None:
    model = _converted(Separable()).train()
    use_kernels(model)
    x = torch.randn(4, 3, 8, 8)
    model.factor = 2.0  # not so when the network was traced
    with pytest.raises(AnywidthError, match="between"):
        model(x)
    model.eval()(x)
    model.factor = 1.0
    model.train()(x)


def test_a_skipped_convolution_does_not_lose_a_norm(deferred: list) -> None:
    model = _converted(Separable()).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = aw.SandwichStep(model, optimizer, nn.functional.cross_entropy, widths=2)
    use_kernels(model)
    x, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    step(x, labels)
    model.factor = 0.0  # not so when the network was traced
    with pytest.raises(AnywidthError, match="skips"):
        step(x, labels)
    model.factor = 1.0
    step(x, labels)


def test_statistics_are_not_those_of_a_tensor_that_has_changed(deferred: list) -> None:
    model = _converted(Separable()).train()
    plain = copy.deepcopy(model)
    use_kernels(model)
    x = torch.randn(4, 3, 8, 8)
    for each in (model, plain):
        whole = each.depthwise.forward
        each.depthwise.forward = lambda given, whole=whole: whole(given).mul_(2).add_(1)
    assert_near(model(x), plain(x), 1e-5)
    for ours, exact in zip(model.buffers(), plain.buffers(), strict=True):
        assert_near(ours, exact, 1e-5)
