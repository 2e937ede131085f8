"""Small networks, one for every kind of layer."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn


def hook_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


LINE, IMAGE, VOLUME, ROWS = (2, 3, 16), (2, 3, 8, 8), (2, 3, 6, 6, 6), (4, 6)


def chain(first: nn.Module, *middle: nn.Module, last: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, *middle, last)


def image_chain(*middle: nn.Module, out: int = 16) -> nn.Sequential:
    return chain(nn.Conv2d(3, 16, 3, padding=1), *middle, last=nn.Conv2d(out, 4, 1))


class Tokens(nn.Module):
    """A small vision transformer: class token, position embedding, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16))
        self.norm = nn.LayerNorm(16)
        self.hidden, self.back = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layer_scale = nn.Parameter(torch.rand(16) + 0.5)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.position
        x = x + self.layer_scale * self.back(torch.relu(self.hidden(self.norm(x))))
        return self.head(x[:, 0])


class Attention(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, **options)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 16), nn.RMSNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


def encoder_layer(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return chain(nn.Linear(6, 16), layer, last=nn.Linear(16, 4))


NETWORKS = {
    "conv1d": lambda: (chain(nn.Conv1d(3, 16, 3), nn.ReLU(), last=nn.Conv1d(16, 4, 1)), LINE),
    "conv2d": lambda: (image_chain(nn.ReLU()), IMAGE),
    "conv3d": lambda: (chain(nn.Conv3d(3, 16, 3), nn.ReLU(), last=nn.Conv3d(16, 4, 1)), VOLUME),
    "transposed1d": lambda: (
        chain(nn.ConvTranspose1d(3, 16, 4, 2), nn.ReLU(), last=nn.ConvTranspose1d(16, 4, 3)),
        LINE,
    ),
    "transposed2d": lambda: (image_chain(nn.ConvTranspose2d(16, 8, 4, 2, 1), out=8), IMAGE),
    "transposed3d": lambda: (
        chain(nn.ConvTranspose3d(3, 16, 2, 2), nn.ReLU(), last=nn.Conv3d(16, 4, 1)),
        VOLUME,
    ),
    "transposed_grouped": lambda: (
        image_chain(nn.ConvTranspose2d(16, 8, 4, 2, 1, groups=4), out=8),
        IMAGE,
    ),
    "transposed_depthwise": lambda: (
        image_chain(nn.ConvTranspose2d(16, 16, 4, 2, 1, groups=16)),
        IMAGE,
    ),
    "depthwise": lambda: (image_chain(nn.Conv2d(16, 16, 3, padding=1, groups=16)), IMAGE),
    "depthwise_multiplier": lambda: (image_chain(nn.Conv2d(16, 32, 3, groups=16), out=32), IMAGE),
    "grouped": lambda: (image_chain(nn.Conv2d(16, 16, 3, groups=8)), IMAGE),
    "linear": lambda: (chain(nn.Linear(6, 16), nn.ReLU(), last=nn.Linear(16, 4)), ROWS),
    "bilinear_pool": lambda: (image_chain(nn.Upsample(scale_factor=2), nn.MaxPool2d(2)), IMAGE),
    "batch_norm1d": lambda: (
        chain(nn.Linear(6, 16), nn.BatchNorm1d(16), last=nn.Linear(16, 4)),
        ROWS,
    ),
    "batch_norm2d": lambda: (image_chain(nn.BatchNorm2d(16), nn.ReLU()), IMAGE),
    "batch_norm3d": lambda: (
        chain(nn.Conv3d(3, 16, 3), nn.BatchNorm3d(16), last=nn.Conv3d(16, 4, 1)),
        VOLUME,
    ),
    "batch_norm_without_statistics": lambda: (
        image_chain(nn.BatchNorm2d(16, track_running_stats=False)),
        IMAGE,
    ),
    "batch_norm_without_weights": lambda: (image_chain(nn.BatchNorm2d(16, affine=False)), IMAGE),
    "batch_norm_cumulative": lambda: (image_chain(nn.BatchNorm2d(16, momentum=None)), IMAGE),
    "layer_norm": lambda: (
        chain(nn.Linear(6, 16), nn.LayerNorm(16), last=nn.Linear(16, 4)),
        ROWS,
    ),
    "layer_norm_over_image": lambda: (image_chain(nn.LayerNorm([16, 8, 8])), IMAGE),
    "layer_norm_without_weights": lambda: (
        chain(nn.Linear(6, 16), nn.LayerNorm(16, elementwise_affine=False), last=nn.Linear(16, 4)),
        ROWS,
    ),
    "group_norm": lambda: (image_chain(nn.GroupNorm(4, 16)), IMAGE),
    "group_norm_of_one": lambda: (image_chain(nn.GroupNorm(1, 16)), IMAGE),
    "group_norm_without_weights": lambda: (image_chain(nn.GroupNorm(4, 16, affine=False)), IMAGE),
    "instance_norm": lambda: (image_chain(nn.InstanceNorm2d(16)), IMAGE),
    "instance_norm_affine": lambda: (image_chain(nn.InstanceNorm2d(16, affine=True)), IMAGE),
    "instance_norm_with_statistics": lambda: (
        image_chain(nn.InstanceNorm2d(16, affine=True, track_running_stats=True)),
        IMAGE,
    ),
    "rms_norm": lambda: (chain(nn.Linear(6, 16), nn.RMSNorm(16), last=nn.Linear(16, 4)), ROWS),
    "rms_norm_without_weights": lambda: (
        chain(nn.Linear(6, 16), nn.RMSNorm(16, elementwise_affine=False), last=nn.Linear(16, 4)),
        ROWS,
    ),
    "prelu_shared": lambda: (image_chain(nn.PReLU()), IMAGE),
    "bare_parameters": lambda: (Tokens(), IMAGE),
    "attention": lambda: (Attention(), (2, 5, 6)),
    "attention_without_bias": lambda: (Attention(bias=False), (2, 5, 6)),
    "encoder_layer": lambda: (encoder_layer(norm_first=False), (2, 5, 6)),
    "encoder_layer_norm_first": lambda: (encoder_layer(norm_first=True), (2, 5, 6)),
}
