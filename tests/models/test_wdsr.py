import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.models.wdsr import DIV2K_MEAN, WDSR, wdsr


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def convolutions(network: nn.Module) -> list[nn.Conv2d]:
    return [module for module in network.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("in_channels", [1, 3])
def test_images_come_out_scale_times_as_large(scale: int, in_channels: int) -> None:
    network = wdsr(channels=4, blocks=2, scale=scale, in_channels=in_channels)
    images = torch.rand(2, in_channels, 7, 10)
    assert network(images).shape == (2, in_channels, 7 * scale, 10 * scale)
    assert network.scale == scale


def test_the_network_of_the_paper_has_its_size() -> None:
    network = wdsr()
    multiply_adds = 48 * 48 * sum(layer.weight.numel() for layer in convolutions(network))
    # 3x3: image to 64, eight times 64 to 256 to 64, 64 to 12; 5x5: image to 12.
    weights = 9 * (3 * 64 + 8 * 2 * 64 * 256 + 64 * 12) + 25 * 3 * 12
    assert multiply_adds == 48 * 48 * weights == 5_457_798_144
    biases = gains = 64 + 8 * (256 + 64) + 12 + 12
    assert sum(p.numel() for p in network.parameters()) == weights + biases + gains


def test_forward_is_wdsr_a_written_out() -> None:
    network = wdsr(channels=6, blocks=3, scale=3, expansion=2).double()
    images = torch.rand(2, 3, 9, 8, dtype=torch.float64)

    def conv(layer: nn.Conv2d, x: Tensor) -> Tensor:
        parameters = layer.parametrizations.weight
        gain, direction = parameters.original0, parameters.original1
        norm = direction.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
        return F.conv2d(x, gain * direction / norm, layer.bias, padding=direction.shape[-1] // 2)

    mean = torch.tensor(DIV2K_MEAN).double().reshape(1, 3, 1, 1)
    x = (images - mean) / 0.5
    features = conv(network.head, x)
    for block in network.body:
        features = features + conv(block.narrow, conv(block.widen, features).clamp(min=0))
    out = F.pixel_shuffle(conv(network.tail, features), 3)
    out = out + F.pixel_shuffle(conv(network.skip, x), 3)
    torch.testing.assert_close(network(images), out * 0.5 + mean)


def test_every_convolution_is_weight_normalised() -> None:
    network = wdsr(channels=4, blocks=2)
    images = torch.rand(1, 3, 8, 8)
    before = network(images)
    for layer in convolutions(network):
        with torch.no_grad():
            layer.parametrizations.weight.original1.mul_(3)
    torch.testing.assert_close(network(images), before)


def narrow(network: WDSR, channels: int, full: int) -> None:
    """Keep the first channels of everything that is counted in multiples of `full`."""
    for layer in convolutions(network):
        parameters = layer.parametrizations.weight
        out_channels, in_channels = parameters.original1.shape[:2]
        rows = out_channels * channels // full if out_channels % full == 0 else out_channels
        columns = in_channels * channels // full if in_channels % full == 0 else in_channels
        parameters.original0 = nn.Parameter(parameters.original0[:rows])
        parameters.original1 = nn.Parameter(parameters.original1[:rows, :columns])
        layer.bias = nn.Parameter(layer.bias[:rows])


def test_sliced_weights_run_and_are_the_narrower_network() -> None:
    network = wdsr(channels=10, blocks=2)
    narrow(network, channels=5, full=10)
    small = wdsr(channels=5, blocks=2)
    small.load_state_dict(network.state_dict(), strict=True)
    images = torch.rand(1, 3, 8, 8)
    assert torch.equal(network(images), small(images))


@pytest.mark.parametrize("blocks", [1, 3])
def test_receptive_radius_is_how_far_gradients_reach(blocks: int) -> None:
    network = wdsr(channels=8, blocks=blocks).double()
    side = 2 * network.receptive_radius + 5
    images = torch.rand(1, 3, side, side, dtype=torch.float64, requires_grad=True)
    middle = side // 2
    pixels = network(images)[..., 2 * middle : 2 * middle + 2, 2 * middle : 2 * middle + 2]
    pixels.square().sum().backward()
    assert images.grad is not None
    reached = images.grad.abs().sum((0, 1, 2)).nonzero()
    assert (reached - middle).abs().max() == network.receptive_radius


def test_the_mean_travels_with_the_weights() -> None:
    trained = wdsr(channels=4, blocks=1, mean=(0.1, 0.2, 0.3))
    loaded = wdsr(channels=4, blocks=1)
    loaded.load_state_dict(trained.state_dict())
    images = torch.rand(1, 3, 5, 5)
    assert torch.equal(loaded(images), trained(images))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"scale": 5}, "scale"),
        ({"channels": 0}, "channels"),
        ({"channels": 1}, "at least 2"),
        ({"blocks": 1.5}, "blocks"),
        ({"expansion": -1}, "expansion"),
        ({"in_channels": 1, "mean": DIV2K_MEAN}, "3 values"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, named: str) -> None:
    with pytest.raises(AnywidthError, match=named):
        wdsr(**arguments)
