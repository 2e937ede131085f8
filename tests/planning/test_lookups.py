"""Operations that look channels up, write them elsewhere, compare or cut them in uneven parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from agreement import assert_agrees, assert_is_whole_with_zeros, convert
from torch import Tensor, nn
from torch.nn import functional as F

import anywidth as aw

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])
IMAGES = torch.randn(2, 3, 8, 8)

Gathering = Callable[[Tensor, Tensor], Tensor]


def spread(index: Tensor, x: Tensor) -> Tensor:
    return index[:, None].expand(-1, x.shape[1])


GATHERINGS: dict[str, Gathering] = {
    "index_add": lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]]),
    "scatter_add": lambda x, e: torch.zeros_like(x).scatter_add(0, spread(e[1], x), x[e[0]]),
    "scatter_reduce": lambda x, e: torch.zeros_like(x).scatter_reduce(
        0, spread(e[1], x), x[e[0]], "amax"
    ),
    "index_put": lambda x, e: x.new_zeros(x.shape).index_put((e[1],), x[e[0]], accumulate=True),
    "gather": lambda x, e: x.gather(0, spread(e[0], x))[: len(x)],
    "topk": lambda x, e: x.topk(4, 0).values.mean(0) + x,
    "argsort": lambda x, e: x[x.detach().mean(1).argsort()],
}


class Messages(nn.Module):
    """A graph network: rows of nodes, written and read along edges."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.gathering = gathering

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.gathering(self.first(x), edges))
        return self.head(F.relu(self.gathering(self.second(x), edges)))


@pytest.mark.parametrize("name", GATHERINGS)
def test_graph_networks_narrow(name: str) -> None:
    inputs = torch.randn(6, 8), EDGES
    model = convert(Messages(GATHERINGS[name]), inputs)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert_agrees(model, *inputs)


class Visible(nn.Module):
    """Tokens that a mask over examples and places chooses, as in a masked autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.stem(x)
        chosen = F.relu(self.block(x[mask].view(len(x), -1, x.shape[-1])))
        return self.head(torch.zeros_like(x).index_put((mask,), chosen.flatten(0, 1)) + x)


def test_a_mask_over_several_dimensions_chooses_whole_rows() -> None:
    inputs = torch.randn(2, 6, 8), torch.arange(6).expand(2, 6) % 2 == 0
    model = convert(Visible(), inputs)
    assert aw.plan_of(model).elastic_layers() == (2, 3)
    assert_agrees(model, *inputs)


class ReadByHeads(nn.Module):
    """Each head reads its part of the channels at places of its own, as deformable attention."""

    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.values, self.places = nn.Conv2d(3, 64, 1), nn.Linear(8, heads * 4 * 2)
        self.head = nn.Linear(64, 5)

    def forward(self, image: Tensor, x: Tensor) -> Tensor:
        b, size = len(x), image.shape[-1]
        values = self.values(image).view(b * self.heads, -1, size, size)
        places = self.places(x).tanh().view(b * self.heads, 1, 4, 2)
        read = F.grid_sample(values, places, align_corners=False)
        return self.head(read.sum(-1).view(b, -1))


def test_heads_that_read_at_places_of_their_own_narrow() -> None:
    inputs = torch.randn(2, 3, 8, 8), torch.randn(2, 8)
    model = convert(ReadByHeads(), inputs)
    small = aw.extract(model, 0.25)
    assert (small.heads, small.values.out_channels, small.places.out_features) == (2, 16, 16)
    assert_agrees(model, *inputs)


def test_channels_that_are_sorted_stay_whole() -> None:
    plan = aw.plan(Messages(lambda x, e: x.topk(32, 1).values), (torch.randn(6, 8), EDGES))
    assert "topk" in (plan.group_of("first").fixed or "")


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.centres = nn.Linear(8, 32), nn.Parameter(torch.randn(5, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(self.stem(x), self.centres)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 24)
        self.both, self.head = nn.Bilinear(16, 24, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.both(self.left(x), self.right(x)))


def test_distances_to_centres_narrow() -> None:
    model = convert(Distances(), torch.randn(4, 8))
    assert aw.macs(model, 0.5) * 2 == aw.macs(model, 1.0) == 8 * 32 + 5 * 32
    assert_agrees(model, torch.randn(4, 8))


def test_layers_of_two_inputs_narrow_on_all_sides() -> None:
    model = convert(TwoInputs(), torch.randn(4, 8))
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    assert aw.macs(model, 1.0) == 8 * 16 + 8 * 24 + 16 * 24 * 32 + 32 * 3
    assert_agrees(model, torch.randn(4, 8))
    assert aw.extract(model, 0.5).both.in2_features == 12


class Boxes(nn.Module):
    def __init__(self, pooled: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32 * 4, 4)
        self.pooled = pooled

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        return self.head(self.pooled(self.stem(x), boxes, 2).flatten(1))


@pytest.mark.parametrize("pooled", [torchvision.ops.roi_align, torchvision.ops.roi_pool])
def test_channels_in_boxes_narrow(pooled: Callable[..., Tensor]) -> None:
    boxes = torch.tensor([[0, 1.0, 1, 6, 6], [1, 2, 2, 7, 7], [0, 0, 0, 5, 5]])
    model = convert(Boxes(pooled), (IMAGES, boxes))
    assert aw.plan_of(model).elastic_layers() == (1, 2)
    assert_agrees(model, IMAGES, boxes)


class Deformed(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 4, 1)
        self.places = nn.Conv2d(16, 18 * groups, 3, padding=1)
        self.layer = torchvision.ops.DeformConv2d(16, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.stem(x))
        return self.head(self.layer(y, self.places(y)))


@pytest.mark.parametrize("groups", [1, 2])
def test_deformed_convolutions_narrow_but_not_their_places(groups: int) -> None:
    model = convert(Deformed(groups), IMAGES)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (2, 4)
    assert plan.group_of("places").fixed is not None
    assert_agrees(model, IMAGES)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_layers_under_spectral_norm_narrow(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(norm(nn.Conv2d(3, 16, 3)), nn.ReLU(), norm(nn.Conv2d(16, 4, 3)))
    before = model.eval()(IMAGES)
    convert(model, IMAGES)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (1, 2)
    assert torch.equal(model(IMAGES), before)
    assert_agrees(model, IMAGES)


class UnevenParts(nn.Module):
    """As in Mamba: one layer gives channels, gates and a few numbers that stay as many."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 32
        self.stem, self.parts = nn.Linear(8, 16), nn.Linear(16, 32 + 32 + 6)
        self.few, self.head = nn.Linear(6, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, gate, few = self.parts(self.stem(x)).split([self.width, self.width, 6], -1)
        return self.head(y * gate.sigmoid() * self.few(few))


def test_parts_sized_by_an_attribute_narrow_and_the_others_stay() -> None:
    model = convert(UnevenParts(), torch.randn(4, 8))
    assert aw.extract(model, 0.5).parts.out_features == 16 + 16 + 6
    assert_agrees(model, torch.randn(4, 8))
    assert aw.plan_of(model).group_of("few").fixed is None


class Skips(nn.Module):
    """Normalises joined channels in groups that do not end where the channels were joined."""

    def __init__(self, skip: int) -> None:
        super().__init__()
        self.skip, self.deep = nn.Conv2d(3, skip, 3, padding=1), nn.Conv2d(skip, 64, 1)
        self.norm = nn.GroupNorm(8, 64 + skip)
        self.head = nn.Conv2d(64 + skip, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.skip(x)
        return self.head(self.norm(torch.cat([self.deep(y), y], 1)))


@pytest.mark.parametrize("skip", [32, 40])
def test_groups_over_joined_channels_narrow(skip: int) -> None:
    model = Skips(skip)
    before = model(IMAGES)
    convert(model, IMAGES)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (2, 3)
    assert any("norm" in note for note in plan.notes)
    assert torch.equal(model(IMAGES), before)
    assert_agrees(model, IMAGES)
    small = aw.extract(model, 0.5).norm
    assert (small.num_groups, small.num_channels) == (4, (64 + skip) // 2)


def test_narrow_graph_networks_are_the_whole_one_with_zeros() -> None:
    inputs = torch.randn(6, 8), EDGES
    original = Messages(GATHERINGS["scatter_add"])
    model = convert(Messages(GATHERINGS["scatter_add"]), inputs)
    model.load_state_dict(original.state_dict())
    assert_is_whole_with_zeros(model, original, *inputs)
