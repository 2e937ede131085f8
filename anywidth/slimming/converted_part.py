"""Networks of which a part was converted, such as a detector with a slimmable backbone."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from anywidth.errors import AnywidthError
from anywidth.slimming.layers import narrow
from anywidth.slimming.norm_statistics import keeps_statistics, new_statistics, norm_records
from anywidth.slimming.record import network_state, record_of
from anywidth.slimming.state import SlimmableState, state_of


def network_in(model: nn.Module) -> nn.Module:
    """The converted network in a model: the model itself, or a part of it.

    The input of a norm after that part changes with the width. Therefore norms around it also keep
    separate statistics per width from now on.
    """
    parts = converted_parts(model)
    if "" in parts:
        return model
    if not parts:
        state_of(model)  # says so
    for name, wraps in (
        ("module", isinstance(model, DataParallel | DistributedDataParallel)),
        ("_orig_mod", hasattr(model, "_orig_mod")),
    ):
        if wraps:
            raise AnywidthError(
                f"{type(model).__name__} wraps a converted network: pass model.{name}"
            )
    if len(parts) > 1:
        raise AnywidthError(
            f"{len(parts)} parts of this {type(model).__name__} were converted: "
            f"{', '.join(map(repr, parts))}. Pass one of them, such as model.{next(iter(parts))}; "
            "to give them one width, call anywidth.slimmable on a module that holds them all"
        )
    (network,) = parts.values()
    state = state_of(network)
    _include_norms(model, network, state)
    if state.norms_outside and state.weights.root is None:  # it was pickled
        state.weights.watch(model)
    return network


def converted_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The converted networks in a model by their paths; "" is the model itself."""
    if not isinstance(model, nn.Module):
        return {}
    if network_state(model) is not None:
        return {"": model}
    return {path: module for path, module in model.named_modules() if network_state(module)}


def _include_norms(model: nn.Module, network: nn.Module, state: SlimmableState) -> None:
    inside = set(network.modules())
    plain = [module for module in model.modules() if record_of(module) is None]
    new = [module for module in plain if module not in inside and keeps_statistics(module)]
    if not new:
        return
    known = [record.bank for record in norm_records(model).values()]
    plan = state.plan
    ends = {plan.resolve(width): width for width in (plan.widths.low, plan.widths.high)}
    labels = {c: e.label for bank in known[:1] for c, e in bank.items()} or ends
    for norm in new:
        narrow(norm, ())
        record = norm_records(norm)[norm]
        for config, label in labels.items():
            if config != plan.full:
                record.bank[config] = new_statistics(norm, label, is_tracked=config in ends)
    state.include(model, network, new)
