import pytest
import torch
from torch import Tensor, nn

from anywidth.app.tasks.super_resolution.upscaling import run_tiled
from anywidth.models.wdsr import wdsr


def image(height: int, width: int, count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, height, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("size", [(64, 64), (50, 33), (24, 71), (25, 24), (7, 60), (5, 3), (1, 1)])
@pytest.mark.parametrize("scale", [2, 3])
def test_tiles_give_what_the_whole_image_gives(size: tuple[int, int], scale: int) -> None:
    torch.manual_seed(0)
    network = wdsr(channels=4, blocks=2, scale=scale).double().eval()
    whole = network(image(*size, count=2))
    tiled = run_tiled(
        network, image(*size, count=2), scale=scale, tile=24, overlap=network.receptive_radius
    )
    torch.testing.assert_close(tiled, whole, rtol=0, atol=1e-12)


def test_whole_number_arithmetic_shows_equality_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)
    for layer in (first, second):
        for parameter in layer.parameters():
            parameter.data = torch.randint(-4, 5, parameter.shape, generator=generator).float()
    network = nn.Sequential(first, nn.ReLU(), second, nn.PixelShuffle(2))
    picture = torch.randint(0, 256, (1, 1, 61, 47), generator=generator).float()
    whole = network(picture)
    assert torch.equal(run_tiled(network, picture, scale=2, tile=16, overlap=3), whole)
    # The check can fail: one pixel less of overlap, and the neighbourhood is not whole.
    assert not torch.equal(run_tiled(network, picture, scale=2, tile=16, overlap=2), whole)


@pytest.mark.parametrize(("tile", "overlap"), [(8, 0), (9, 4), (16, 3), (40, 19)])
def test_every_pixel_is_kept_exactly_once(tile: int, overlap: int) -> None:
    for length in range(1, 60):
        picture = torch.arange(length * 2).reshape(1, 1, 2, length).float()
        tiled = run_tiled(lambda part: part, picture, scale=1, tile=tile, overlap=overlap)
        assert torch.equal(tiled, picture)


def test_the_network_sees_one_shape_no_larger_than_a_tile() -> None:
    shapes = []

    def network(part: Tensor) -> Tensor:
        shapes.append(tuple(part.shape))
        assert not torch.is_grad_enabled()
        return part.repeat_interleave(2, -1).repeat_interleave(2, -2)

    run_tiled(network, image(100, 37), scale=2, tile=32, overlap=5)
    assert set(shapes) == {(1, 3, 32, 32)}
    assert len(shapes) == 5 * 2
    shapes.clear()
    run_tiled(network, image(100, 20), scale=2, tile=32, overlap=5)
    assert set(shapes) == {(1, 3, 32, 20)}


def test_result_has_the_networks_type_and_channels() -> None:
    tiled = run_tiled(lambda part: part[:, :1].float(), image(30, 30), scale=1, tile=8, overlap=1)
    assert tiled.dtype == torch.float32
    assert tiled.shape == (1, 1, 30, 30)
    assert not tiled.requires_grad


def test_tiles_are_counted_if_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    def enlarge(tile: Tensor) -> Tensor:
        return tile.repeat_interleave(2, -1).repeat_interleave(2, -2)

    image = torch.rand(1, 3, 40, 40)
    large = run_tiled(enlarge, image, scale=2, tile=24, overlap=2, shows_progress=True)
    assert torch.equal(large, enlarge(image))
    assert "upscaling 4/4" in capsys.readouterr().err
    run_tiled(enlarge, image, scale=2, tile=48, overlap=2, shows_progress=True)
    assert capsys.readouterr().err == ""
