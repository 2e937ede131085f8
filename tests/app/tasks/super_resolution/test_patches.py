import pytest
import torch
from torch import Tensor

from anywidth.app.tasks.super_resolution.patches import PatchLoader
from anywidth.app.tasks.super_resolution.pictures import PicturePairs, Pictures
from anywidth.errors import AnywidthError

SIZES = ((12, 20), (31, 9), (16, 16))


def make_pairs(sizes: tuple[tuple[int, int], ...] = SIZES, scale: int = 2) -> PicturePairs:
    """Pixels that say where they are: (picture, row, column) at low resolution, and every
    high-resolution pixel has the colour of the low-resolution one it lies in."""
    low, high = [], []
    for number, (height, width) in enumerate(sizes):
        rows = torch.arange(height).reshape(-1, 1).expand(height, width)
        columns = torch.arange(width).expand(height, width)
        picture = torch.stack([torch.full((height, width), number), rows, columns], dim=-1)
        low.append(picture.byte().reshape(-1, 3))
        large = picture.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        high.append(large.byte().reshape(-1, 3))
    high_sizes = tuple((height * scale, width * scale) for height, width in sizes)
    names = tuple(f"picture {number}" for number in range(len(sizes)))
    return PicturePairs(
        names, Pictures(torch.cat(low), sizes), Pictures(torch.cat(high), high_sizes), scale
    )


def levels(patches: Tensor) -> Tensor:
    return (patches * 255).round().long()


def whole_epoch(loader: PatchLoader, epoch: int = 0, start: int = 0) -> tuple[Tensor, Tensor]:
    low, high = zip(*loader.epoch(epoch, start), strict=True)
    return torch.cat(low), torch.cat(high)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_low_and_high_patches_show_the_same_place(scale: int) -> None:
    loader = PatchLoader(make_pairs(scale=scale), batch_size=8, patch=5, samples=200)
    for low, high in loader.epoch(0):
        assert low.shape == (8, 3, 5, 5)
        assert high.shape == (8, 3, 5 * scale, 5 * scale)
        assert low.dtype == high.dtype == torch.float32
        assert low.is_contiguous(memory_format=torch.channels_last)
        enlarged = low.repeat_interleave(scale, -2).repeat_interleave(scale, -1)
        assert torch.equal(high, enlarged)


def test_patches_are_cut_from_the_pictures_in_all_eight_ways() -> None:
    pairs = make_pairs()
    low, _ = whole_epoch(PatchLoader(pairs, batch_size=10, patch=4, samples=1000))
    ways = set()
    for patch in levels(low):
        picture, top, left = patch.amin((1, 2)).tolist()
        cut = pairs.low[picture][:, top : top + 4, left : left + 4].long()
        lying = {
            (turn, flipped): torch.rot90(cut.flip(-1) if flipped else cut, turn, (1, 2))
            for turn in range(4)
            for flipped in (False, True)
        }
        (way,) = (name for name, turned in lying.items() if torch.equal(turned, patch))
        ways.add(way)
    assert len(ways) == 8


def places(loader: PatchLoader) -> tuple[Tensor, Tensor]:
    """Which picture each patch is from, and its (top, left)."""
    low, _ = whole_epoch(loader)
    corner = levels(low).amin((2, 3))
    return corner[:, 0], corner[:, 1:]


def test_every_place_is_equally_likely() -> None:
    loader = PatchLoader(make_pairs(), batch_size=100, patch=8, samples=20_000)
    picture, corner = places(loader)
    counts = torch.tensor([(height - 7) * (width - 7) for height, width in SIZES])
    share = torch.bincount(picture, minlength=3) / len(picture)
    torch.testing.assert_close(share, counts / counts.sum(), atol=0.015, rtol=0)
    seen = torch.unique(torch.cat([picture[:, None], corner], 1), dim=0, return_counts=True)[1]
    assert len(seen) == counts.sum()
    expected = 20_000 / counts.sum()
    chi_squared = ((seen - expected) ** 2 / expected).sum() / len(seen)
    assert 0.7 < chi_squared < 1.3


def test_an_epoch_goes_on_where_it_stopped() -> None:
    loader = PatchLoader(make_pairs(), batch_size=4, patch=6, samples=43, seed=3)
    assert len(loader) == 10
    assert (loader.samples, loader.batch_size) == (43, 4)
    torch.manual_seed(1)
    low, high = whole_epoch(loader, epoch=2)
    torch.manual_seed(2)
    other = PatchLoader(make_pairs(), batch_size=4, patch=6, samples=43, seed=3)
    low_rest, high_rest = whole_epoch(other, epoch=2, start=7)
    assert torch.equal(low_rest, low[28:])
    assert torch.equal(high_rest, high[28:])
    assert list(loader.epoch(2, start=10)) == []


def test_seeds_epochs_and_steps_differ() -> None:
    loader = PatchLoader(make_pairs(), batch_size=8, patch=6, samples=16)
    (first, _), (second, _) = loader.epoch(0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, next(loader.epoch(1))[0])
    reseeded = PatchLoader(make_pairs(), batch_size=8, patch=6, samples=16, seed=1)
    assert not torch.equal(first, next(iter(reseeded))[0])


def test_the_draw_does_not_touch_or_read_global_randomness() -> None:
    state = torch.get_rng_state()
    whole_epoch(PatchLoader(make_pairs(), batch_size=8, patch=6, samples=16))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_what_one_process_sees(world_size: int) -> None:
    options = {"batch_size": 6, "patch": 6, "samples": 30, "seed": 9}
    alone = list(PatchLoader(make_pairs(), **options).epoch(4))
    ranks = [
        list(PatchLoader(make_pairs(), **options, rank=rank, world_size=world_size).epoch(4))
        for rank in range(world_size)
    ]
    for step, (low, high) in enumerate(alone):
        assert torch.equal(torch.cat([rank[step][0] for rank in ranks]), low)
        assert torch.equal(torch.cat([rank[step][1] for rank in ranks]), high)


def test_pictures_may_stay_off_the_device() -> None:
    options = {"batch_size": 4, "patch": 6, "samples": 20}
    low, high = whole_epoch(PatchLoader(make_pairs(), **options))
    sent = whole_epoch(PatchLoader(make_pairs(), **options, pictures_on_device=False))
    assert torch.equal(sent[0], low)
    assert torch.equal(sent[1], high)


def test_an_epoch_covers_the_pictures_once_by_default() -> None:
    pixels = sum(height * width for height, width in SIZES)
    assert PatchLoader(make_pairs(), batch_size=2, patch=6).samples == pixels // 36
    assert len(PatchLoader(make_pairs(), batch_size=64, patch=6)) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"patch": 10}, "picture 1"),
        ({"patch": 0}, "patch"),
        ({"batch_size": 3, "world_size": 2}, "ranks"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"samples": 3, "batch_size": 4}, "batch-size"),
    ],
)
def test_bad_arguments_are_named(options: dict, named: str) -> None:
    with pytest.raises(AnywidthError, match=named):
        PatchLoader(make_pairs(), **{"patch": 4, "batch_size": 4, **options})


def test_a_start_beyond_the_epoch_is_named() -> None:
    loader = PatchLoader(make_pairs(), batch_size=4, patch=6, samples=20)
    with pytest.raises(AnywidthError, match="start"):
        loader.epoch(0, start=6)
