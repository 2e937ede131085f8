"""Batch norm with private scale and bias per switch, as in slimmable networks.

A slimmable network (S-Net) runs at a few widths, its switches, each with its own batch-norm
statistics (`track_statistics`). Here each switch also gets its own scale and bias.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from anywidth.errors import AnywidthError
from anywidth.slimming.convert import at_width
from anywidth.slimming.layers import PRIVATE_AFFINE, dress
from anywidth.slimming.norm_statistics import scaled_norms
from anywidth.slimming.state import state_of
from anywidth.width import Width


class PrivateAffine(nn.Module):
    """Scale and bias of one batch norm per switch; full width uses the norm's own."""

    def __init__(self, sizes: Sequence[int], like: Tensor) -> None:
        super().__init__()
        self.weight = nn.ParameterList([nn.Parameter(like.new_ones(size)) for size in sizes])
        self.bias = nn.ParameterList([nn.Parameter(like.new_zeros(size)) for size in sizes])


def add_private_affine(model: nn.Module, switches: Sequence[Width]) -> None:
    """Give every batch norm of a converted network a scale and bias per switch.

    They are ordinary parameters of the network, named `<norm>.private_affine.weight.<i>`.
    """
    state = state_of(model)
    configs = [state.resolve(width) for width in switches]
    narrow = [config for config in configs if config != state.plan.full]
    norms = scaled_norms(model)
    if not norms:
        raise AnywidthError(
            "this network has no batch norm with a scale, so there is nothing to add"
        )
    for norm, record in norms.items():
        if hasattr(norm, PRIVATE_AFFINE):
            raise AnywidthError(
                f"{type(norm).__name__} already has an attribute {PRIVATE_AFFINE!r}, the name of "
                "the private scales and biases: rename the attribute"
            )
        sizes = []
        for config in narrow:
            with at_width(model, config):
                sizes.append(int(norm.num_features))  # type: ignore[arg-type]
        like = norm._parameters["weight"]
        assert like is not None
        norm.add_module(PRIVATE_AFFINE, PrivateAffine(sizes, like.detach()))
        record.switches = {config: i for i, config in enumerate(narrow)}
        dress(norm)
