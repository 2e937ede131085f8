"""Sizes that the code gives as attributes of modules, or as multiples of them, are found."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import pytest
import torch
from agreement import assert_agrees, assert_close, convert
from torch import Tensor, nn
from torch.nn import functional as F

import anywidth as aw
from anywidth.planning.trace.known_ints import KnownInt, SizeSource
from anywidth.slimming.extraction import extract_quietly


class Cells(nn.Module):
    """First states of a size that the network keeps under a name of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.many, self.cell = width, nn.LSTMCell(3, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, cell = torch.zeros(x.size(0), self.many), x.new_zeros((x.size(0), self.many))
        for step in x.split(1, dim=1):
            state, cell = self.cell(step.squeeze(1), (state, cell))
        return self.head(state)


class Decoder(nn.Module):
    """A picture made of a vector, with the sizes in `nn.Unflatten`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 9 * width), nn.Unflatten(1, (width, 3, 3)), nn.Conv2d(width, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Twice(nn.Module):
    """A reshape to a multiple of an attribute, which other channels follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c = width
        self.first, self.second = nn.Conv1d(3, width, 1), nn.Conv1d(width, 2 * width, 1)
        self.head = nn.Conv1d(3 * width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        points = self.first(x).relu()
        whole = self.second(points).amax(2).view(-1, 2 * self.c, 1)
        return self.head(torch.cat([whole.repeat(1, 1, x.shape[2]), points], 1))


class Gated(nn.Module):
    """Gates and skips are slices up to attributes, of unequal sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kept, self.skipped = width, 3 * width // 2
        self.stem, self.gates = nn.Conv1d(1, width, 1), nn.Conv1d(width, 2 * width, 1)
        self.both = nn.Conv1d(width, width + self.skipped, 1)
        self.head = nn.Conv1d(self.skipped, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, skip = self.stem(x), torch.tensor(0.0)
        for _ in range(2):
            z = self.gates(y)
            both = self.both(z[:, : self.kept].tanh() * z[:, self.kept :].sigmoid())
            y, skip = y + both[:, : self.kept], skip + both[:, self.kept :]
        return self.head(F.relu(skip))


class Shift(nn.Module):
    """An eighth of the channels goes to the next frame, an eighth to the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(3, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        part = x.shape[-1] // 8
        y = torch.zeros_like(x)
        y[:, :-1, :part] = x[:, 1:, :part]
        y[:, 1:, part : 2 * part] = x[:, :-1, part : 2 * part]
        y[:, :, 2 * part :] = x[:, :, 2 * part :]
        return self.head(self.body(y).relu())


class Spectral(nn.Module):
    """A new complex tensor whose picture is as large as it has channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out_channels, self.stem = width, nn.Conv2d(1, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, 2, 2, dtype=torch.cfloat) / width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft2(self.stem(x))
        made = torch.zeros(len(x), self.out_channels, 16, 9, dtype=torch.cfloat)
        made[..., :2, :2] = torch.einsum("bixy,ioxy->boxy", y[..., :2, :2], self.weight)
        return self.head(torch.fft.irfft2(made, s=x.shape[-2:]))


class Modulated(nn.Module):
    """A weight per example, as in StyleGAN, scaled by 1/sqrt of its inputs."""

    def __init__(self, width: int, made: int) -> None:
        super().__init__()
        self.made, self.scale = made, 1 / math.sqrt(width * 9)
        self.weight = nn.Parameter(torch.randn(1, made, width, 3, 3))
        self.style = nn.Linear(4, width)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        count, channels, high, wide = x.shape
        weight = self.scale * self.weight * self.style(style).view(count, 1, channels, 1, 1)
        weight = weight.view(count * self.made, channels, 3, 3)
        y = F.conv2d(x.view(1, -1, high, wide), weight, padding=1, groups=count)
        return y.view(count, self.made, high, wide)


class Generator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, width, 4, 4))
        self.first, self.last = Modulated(width, width), Modulated(width, 3)

    def forward(self, style: Tensor) -> Tensor:
        x = self.start.repeat(len(style), 1, 1, 1)
        return self.last(F.relu(self.first(x, style)), style)


class Mixed(nn.Module):
    """Halves of the channels change places, in a new tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c, self.stem, self.head = width, nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.empty_like(x)
        y[:, : self.c // 2] = x[:, self.c // 2 :]
        y[:, self.c // 2 :] = x[:, : self.c // 2]
        return self.head(y.relu() + x)


EXAMPLES = {
    Cells: (2, 5, 3),
    Decoder: (2, 4),
    Twice: (2, 3, 7),
    Gated: (2, 1, 9),
    Shift: (2, 4, 3),
    Spectral: (2, 1, 16, 16),
    Generator: (3, 4),
    Mixed: (2, 3),
}


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_a_narrow_network_is_the_one_its_author_would_build(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(EXAMPLES[kind])
    model = convert(kind(16), x, aw.WidthRange(0.25, 1.0, divisor=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert_agrees(model, x)
    small, built = extract_quietly(model, 0.5), kind(8).eval()
    built.load_state_dict(small.state_dict())
    with torch.no_grad():
        assert_close(small.eval()(x), built(x))


def test_constant_sizes_keep_their_channels() -> None:
    class Constant(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            return self.body[2](self.body[0](x).view(-1, 16, 3, 3))

    with pytest.raises(aw.AnywidthError, match="by view"):
        aw.slimmable(Constant(16), example_input=torch.randn(2, 4))


def test_only_the_shape_of_a_slice_is_read() -> None:
    class Times(nn.Module):
        """A channel of ones, made like the first one, as neural ODEs do for the time."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body = nn.Conv2d(3, 16, 1), nn.Conv2d(17, 16, 1)
            self.head = nn.Conv2d(16, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(self.body(torch.cat([torch.ones_like(x[:, :1]), x], 1)))

    x = torch.randn(2, 3, 4, 4)
    model = convert(Times(), x)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert_agrees(model, x)


def test_a_rest_kept_in_a_tuple_is_no_size() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shape, self.stem, self.head = (
                (1, -1, 1, 1),
                nn.Conv2d(3, 16, 1),
                nn.Conv2d(16, 2, 1),
            )
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x) * self.scale.view(self.shape))

    model = convert(Scaled(), torch.randn(2, 3, 4, 4))
    assert model.shape == (1, -1, 1, 1)
    assert aw.plan_of(model).elastic_layers() == (1, 2)


def test_numbers_remember_where_they_come_from() -> None:
    source = SizeSource("block", "dim")
    dim = KnownInt(24, source)
    assert (2 * dim).source.ratio == 2
    assert (dim * 3 // 2).source.ratio == Fraction(3, 2)
    for number in (dim + 1, dim * dim, 100 // dim, dim // 5):
        assert type(number) is int
    assert dim * 0.5 == 12.0
    assert [0] * KnownInt(2, source) == [0, 0]
    assert copy.deepcopy({"a": dim})["a"].source == source


class Sizes:
    def __init__(self) -> None:
        self.stages, self.note = [16, 32], "no numbers"


class OfLists(nn.Module):
    """Sizes in a list that the network keeps, and in that of a configuration."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.config, self.dims = kind, Sizes(), [16, 32]
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.dims if self.kind == "own" else self.config.stages
        x = self.first(x).view(x.size(0), sizes[0], -1)
        x = self.second(x.view(x.size(0), sizes[0], 6, 6)).permute(0, 2, 3, 1)
        return self.head(x.reshape(x.size(0), -1, sizes[-1]).mean(1))


@pytest.mark.parametrize("kind", ["own", "configuration"])
def test_sizes_of_a_list_are_followed(kind: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = convert(OfLists(kind), x)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (2, 3)
    assert_agrees(model, x)
    small = aw.extract(model, {"first": 0.5, "second": 0.25})
    assert (small.dims if kind == "own" else small.config.stages) == [8, 8]
    assert (model.dims, model.config.stages) == ([16, 32], [16, 32])
    assert type(small.dims) is list
    again = aw.Plan.from_json(plan.to_json())
    assert_agrees(aw.slimmable(OfLists(kind), again, strict=True, example_input=x), x)


class GroupedHeads(nn.Module):
    """Each group of a convolution makes two heads, so that the cut needs no guess."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.each = 8, 4
        self.stem, self.head = nn.Conv1d(3, 32, 1), nn.Conv1d(32, 2, 1)
        self.q, self.k = nn.Conv1d(32, 32, 1, groups=4), nn.Conv1d(32, 32, 1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        shape = (x.size(0), self.many, self.each, x.size(-1))
        q, k = self.q(x).view(shape), self.k(x).view(shape)
        return self.head((q * (q * k).sum(2, keepdim=True)).flatten(1, 2))


def test_a_number_of_heads_is_followed_if_the_cut_needs_no_guess() -> None:
    x = torch.randn(2, 3, 5)
    model = convert(GroupedHeads(), x)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    assert aw.extract(model, 0.5).many == 4
    assert_agrees(model, x)


class Scaled(nn.Module):
    """A scale of each channel, whose shape is kept as a tuple, as MetaFormer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape, self.scale = (width, 1, 1), nn.Parameter(torch.ones(width))
        self.layer = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x * self.scale.view(self.shape)


def test_a_parameter_takes_its_shape_from_a_tuple() -> None:
    x = torch.randn(2, 3, 4, 4)
    model = convert(nn.Sequential(nn.Conv2d(3, 16, 1), Scaled(16), nn.Conv2d(16, 2, 1)), x)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert aw.extract(model, 0.5)[1].shape == (8, 1, 1)
    assert_agrees(model, x)
