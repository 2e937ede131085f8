"""The network of a super-resolution run, converted, with its initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anywidth.app.tasks.starting_network import built_alone
from anywidth.app.tasks.super_resolution.resize import upscale
from anywidth.app.tasks.super_resolution.settings import SuperResolutionSettings
from anywidth.models.wdsr import WDSR, wdsr
from anywidth.planning.trace import plan as make_plan
from anywidth.slimming.convert import slimmable
from anywidth.width import WidthRange, round_channels

EXAMPLE_SIDE = 48
"""Multiply-adds are counted for a low-resolution input of 48x48, as in the paper."""


def build_model(settings: SuperResolutionSettings) -> WDSR:
    """The converted network of a run, with its initial weights.

    At width k / channels it is the WDSR of k channels: inside each block the wide activation keeps
    its exact multiple of the block's channels, which rounding could miss by one. Nonuniform, each
    block has a wide activation of its own.
    """
    torch.manual_seed(settings.seed)
    channels, widths = settings.channels, settings.width_range
    if settings.own_channels is not None:
        example = torch.rand(2, 3, EXAMPLE_SIDE, EXAMPLE_SIDE)
        whole = wdsr(channels, settings.blocks, settings.scale)
        model, widths = built_alone(whole, example, settings, _draw_again)
    else:
        if settings.method == "i":
            # Built for its width, so that its initial weights fit its fan-in.
            channels = min(channels, round_channels(channels * settings.width, settings.divisor))
            widths = WidthRange(1.0, 1.0, settings.divisor)
        model = wdsr(channels, settings.blocks, settings.scale)
    assert isinstance(model, WDSR)
    if settings.bicubic_start:
        start_from_bicubic(model)
    plan = make_plan(model, torch.rand(2, 3, EXAMPLE_SIDE, EXAMPLE_SIDE))
    is_free = settings.nonuniform or settings.own_channels is not None
    carried = plan.group_of("head")
    for block in range(0 if is_free else settings.blocks):
        wide = plan.group_of(f"body.{block}.widen")
        plan.tie(wide.name, carried.name, wide.channels // carried.channels)
    slimmable(model, plan, widths)
    return model


@torch.no_grad()
def _draw_again(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            plain = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size[0])
            layer.weight = plain.weight.detach()
            _bias(layer).copy_(_bias(plain))


@torch.no_grad()
def start_from_bicubic(model: WDSR) -> None:
    """Set the 5x5 skip to bicubic upscaling and scale the deep branch to a tenth.

    With random weights, a network needs a hundred steps or more to reach bicubic.
    """
    radius, scale = 2, model.scale
    impulse = torch.zeros(1, 1, 4 * radius + 1, 4 * radius + 1)
    impulse[..., 2 * radius, 2 * radius] = 1
    # Column d of phase p is the response d pixels before the impulse: a correlation kernel.
    around = slice(radius * scale, (3 * radius + 1) * scale)
    response = upscale(impulse, scale)[0, 0, around, around]
    phases = response.unflatten(0, (-1, scale)).unflatten(2, (-1, scale)).permute(1, 3, 0, 2)
    kernels = phases.flip(2, 3).flatten(0, 1)
    weight = torch.zeros_like(model.skip.weight)
    for channel in range(weight.shape[1]):
        weight[channel * scale**2 : (channel + 1) * scale**2, channel] = kernels
    model.skip.weight = weight
    nn.init.zeros_(_bias(model.skip))
    nn.init.zeros_(_bias(model.tail))
    model.tail.weight = 0.1 * model.tail.weight


def _bias(layer: nn.Conv2d) -> Tensor:
    assert layer.bias is not None
    return layer.bias
