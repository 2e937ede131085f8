"""At every width, the runtime gives what the sliced network gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anywidth_runtime
import numpy as np
import pytest
import torch
import torchvision
from agreement import configurations, stir
from layer_networks import NETWORKS as LAYERS
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import anywidth as aw

WIDTHS = [0.25, 0.6, 1.0]


class Shuffled(nn.Module):
    """Channels are joined, so that a width keeps several stretches of an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.left, self.right = nn.Conv2d(16, 24, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(48)
        self.mixed, self.last = nn.Conv2d(48, 32, 3), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.norm(torch.cat([self.left(x), x, self.right(x)], 1)).relu()
        return self.last(self.mixed(x).mean((2, 3)))


def resnet() -> nn.Module:
    layers = [1, 1, 1, 1]
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, layers, num_classes=10)


def vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)


def shufflenet() -> nn.Module:
    return torchvision.models.ShuffleNetV2([1, 1, 1], [24, 32, 64, 128, 256], num_classes=10)


def of_layer(name: str) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    return lambda: LAYERS[name]()[0], LAYERS[name]()[1]


IMAGES = (2, 3, 32, 32)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mobilenet_v1": (lambda: aw.models.mobilenet_v1(10), IMAGES),
    "mobilenet_v2": (lambda: aw.models.mobilenet_v2(10), IMAGES),
    "resnet": (resnet, IMAGES),
    "vit": (vit, IMAGES),
    "shuffled": (Shuffled, IMAGES),
    "shufflenet": (shufflenet, IMAGES),
    "wdsr": (lambda: aw.models.wdsr(channels=16, blocks=2), (2, 3, 12, 12)),
    "atari_cnn": (lambda: aw.models.atari_cnn(4), (2, 4, 84, 84)),
    "transposed": of_layer("transposed2d"),
    "norm_over_image": of_layer("layer_norm_over_image"),
    "encoder_layer": of_layer("encoder_layer"),
}


def true_outputs(model: nn.Module, width: aw.ChannelConfig | float, x: Tensor) -> list[Tensor]:
    with torch.no_grad(), aw.at_width(model, width):
        return list(tree_leaves(model(x)))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_runtime_gives_what_the_sliced_network_gives(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model, example = build(), torch.randn(shape)
    aw.slimmable(model, aw.plan(model, example), aw.WidthRange(0.25, 1.0, divisor=4))
    stir(model, [example])
    nonuniform = configurations(model)[-1]
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        aw.calibrate(model, [torch.randn(8, *shape[1:])], widths=[*WIDTHS, nonuniform])
    model.eval()
    path = tmp_path / "net.anywidth"
    aw.export_bundle(model, path, [*WIDTHS, nonuniform], measure_latency=False, progress=False)
    net = anywidth_runtime.open(path)
    assert set(net.widths) == {*WIDTHS, "nonuniform 1"}
    weights = sum(4 * p.numel() for p in model.parameters() if p.dim() > 1)
    assert path.stat().st_size < 1.2 * weights + 150_000  # a copy per width would be 2.2 times
    x = torch.randn(3, *shape[1:])
    for width in net.widths:
        found = net.run(x.numpy(), width=width)
        arrays = list(found.values()) if isinstance(found, dict) else [found]
        config = nonuniform if isinstance(width, str) else width
        for one, true in zip(arrays, true_outputs(model, config, x), strict=True):
            np.testing.assert_allclose(one, true, rtol=1e-4, atol=1e-5 * float(true.abs().max()))
