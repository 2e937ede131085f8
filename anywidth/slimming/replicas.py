"""A second network object over the memory of the first, for another thread."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from anywidth.distributed import check_not_sharded
from anywidth.slimming.converted_part import network_in
from anywidth.slimming.extraction import own_classes, without_graphs
from anywidth.slimming.norm_statistics import norm_record
from anywidth.slimming.state import check_layers, state_of


def replica(model: nn.Module) -> nn.Module:
    """A network with its own width, over the parameters, buffers and statistics of `model`.

    For threads that run at different widths: each uses a replica. A replica costs no memory for
    weights and can be made at any time, also of a replica.

    Weights and statistics are shared: if one network is trained, loaded or calibrated, all change.
    Do this while no other thread runs, because a pass could read values that are half written.
    Everything else is separate: the width, training or evaluation mode, hooks.

    Move and cast a network (`model.to`, `model.half`) before you make replicas.

    Args:
        model: a converted network, or a model with one in it.

    Example:
        >>> def serve(model, width, batches, results):
        ...     with anywidth.at_width(model, width), torch.no_grad():
        ...         results.extend(model(batch) for batch in batches)
        >>> thread = threading.Thread(
        ...     target=serve, args=(anywidth.replica(model), 0.25, batches, results)
        ... )
    """
    network = network_in(model)
    check_layers(network)
    check_not_sharded(model, "replica")
    state = state_of(network)
    shared: list[Any] = [state.weights.trainings]
    for module in model.modules():
        shared += [*module._parameters.values(), *module._buffers.values()]
        record = norm_record(module)
        if record is not None:
            record.settle()
            shared.append(record.bank)
    with state.at(network, state.width), without_graphs(model):
        twin = copy.deepcopy(model, {id(one): one for one in shared})
    own_classes(twin)
    return twin
