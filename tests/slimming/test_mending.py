"""Numbers that modules check the sizes of their inputs with are found by running the network."""

from __future__ import annotations

import torch
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw


class Checked(nn.Module):
    """A layer that refuses inputs of another size than it was built for."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels, self.layer = channels, nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.channels
        return x + self.layer(x)


def test_several_modules_that_check_one_size_follow_it() -> None:
    x = torch.randn(2, 3, 4, 4)
    blocks = (Checked(16), Checked(16), Checked(16))
    model = convert(nn.Sequential(nn.Conv2d(3, 16, 1), *blocks, nn.Conv2d(16, 2, 1)), x)
    assert aw.plan_of(model).elastic_layers() == (4, 5)
    assert [block.channels for block in aw.extract(model, 0.25)[1:4]] == [4, 4, 4]
    assert_agrees(model, x)


def test_a_size_counted_in_parts_of_units_is_found() -> None:
    class Joined(nn.Module):
        """Norm groups of joined channels are units of more channels than one layer makes."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.checked = nn.Conv2d(3, 16, 1), Checked(16)
            self.wide, self.norm = nn.Conv2d(16, 32, 1), nn.GroupNorm(4, 48)
            self.head = nn.Conv2d(48, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.checked(self.stem(x))
            return self.head(self.norm(torch.cat([self.wide(x), x], 1)))

    x = torch.randn(2, 3, 4, 4)
    model = convert(Joined(), x)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    assert_agrees(model, x)


def test_features_of_a_head_that_the_code_takes_from_the_whole_are_tied_to_it() -> None:
    class Attention(nn.Module):
        """The number of heads has a name of its own; each has a part of the channels."""

        def __init__(self) -> None:
            super().__init__()
            self.nh, self.stem, self.qkv = 4, nn.Linear(8, 32), nn.Linear(32, 96)
            self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            b, n, c = x.shape
            joined = self.qkv(x).reshape(b, n, 3, self.nh, c // self.nh).permute(2, 0, 3, 1, 4)
            q, k, v = joined.unbind(0)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.head(x + self.out(mixed.transpose(1, 2).reshape(b, n, c)))

    x = torch.randn(2, 5, 8)
    model = convert(Attention(), x)
    plan = aw.plan_of(model)
    assert plan.elastic_layers() == (3, 4)
    assert any("shrink with" in note for note in plan.notes)
    assert aw.extract(model, 0.5).qkv.weight.shape == (48, 16)
    assert_agrees(model, x)
