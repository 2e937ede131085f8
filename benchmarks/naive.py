"""Slimmable networks as they are usually written: layers compute their channels as they run.

Every layer has its full channels and a `width_mult` that `model.apply` sets before a pass; forward
rounds the channels, slices the weights and calls the functional. Batch norms have separate
statistics for known widths and use the batch's statistics for others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anywidth as aw
from anywidth.width import round_channels

DIVISOR = 8


class NaiveConv2d(nn.Conv2d):
    """A convolution that slices itself; with `fixed_inputs` it uses all input channels."""

    width_mult = 1.0
    fixed_inputs = False
    is_depthwise = False

    def forward(self, x: Tensor) -> Tensor:
        full_out, full_in = self.weight.shape[0], self.in_channels
        channels_in = (
            full_in if self.fixed_inputs else round_channels(full_in * self.width_mult, DIVISOR)
        )
        channels_out = round_channels(full_out * self.width_mult, DIVISOR)
        groups = channels_in if self.is_depthwise else 1
        weight = self.weight[:channels_out, : 1 if self.is_depthwise else channels_in]
        bias = None if self.bias is None else self.bias[:channels_out]
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, groups)


class NaiveLinear(nn.Linear):
    width_mult = 1.0

    def forward(self, x: Tensor) -> Tensor:
        channels = round_channels(self.in_features * self.width_mult, DIVISOR)
        return F.linear(x, self.weight[:, :channels], self.bias)


class NaiveBatchNorm2d(nn.BatchNorm2d):
    width_mult = 1.0
    known_widths: tuple[float, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        channels = round_channels(self.num_features * self.width_mult, DIVISOR)
        weight, bias = self.weight[:channels], self.bias[:channels]
        mean = variance = None
        if self.width_mult in self.known_widths:
            index = self.known_widths.index(self.width_mult)
            mean = getattr(self, f"mean_{index}")[:channels]
            variance = getattr(self, f"variance_{index}")[:channels]
        return F.batch_norm(x, mean, variance, weight, bias, True, self.momentum or 0.1, self.eps)


def make_naive(model: nn.Module, known_widths: tuple[float, ...]) -> nn.Module:
    """Replace the layers of a plain network by naive ones, in place."""
    first = True
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            depthwise = 1 < module.groups == module.in_channels
            module.__class__ = NaiveConv2d
            module.__dict__.update(is_depthwise=depthwise, fixed_inputs=first)
            first = False
        elif isinstance(module, nn.BatchNorm2d):
            module.__class__ = NaiveBatchNorm2d
            module.__dict__["known_widths"] = known_widths
            for index in range(len(known_widths)):
                module.register_buffer(f"mean_{index}", torch.zeros(module.num_features))
                module.register_buffer(f"variance_{index}", torch.ones(module.num_features))
        elif isinstance(module, nn.Linear):
            module.__class__ = NaiveLinear
    return model


def naive_step(
    model: nn.Module, widths: tuple[float, ...], images: Tensor, labels: Tensor
) -> Callable[[], None]:
    """One step over all widths as it is usually written: it reads back the loss of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)

    def run() -> None:
        optimizer.zero_grad()
        soft_labels = None
        for width in widths:
            model.apply(lambda module, width=width: setattr(module, "width_mult", width))  # type: ignore[misc]
            output = model(images)
            if soft_labels is None:
                loss = F.cross_entropy(output, labels)
                soft_labels = output.detach()
            else:
                loss = aw.soft_cross_entropy(output, soft_labels)
            loss.backward()
            loss.item()
        optimizer.step()

    return run
