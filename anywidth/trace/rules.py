"""The table of rules: how channels pass through each operation, one row an operation.

A rule takes the trace's context and the operation's arguments by their ATen names, says which
axes shrink together, and returns the result's axes. An operation with no row fixes whatever
channels it touches: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Arguments
from typing import Any

from anywidth.trace.elementwise_rules import (
    along_dims,
    constant,
    elementwise,
    nothing,
    reduction,
    spatial,
)
from anywidth.trace.layer_rules import (
    batch_norm,
    convolution,
    embedding,
    group_norm,
    layer_norm,
    linear,
    prelu,
    recurrent,
    transposed_convolution,
    weight_norm,
)
from anywidth.trace.product_rules import addmm, attention, einsum, matmul
from anywidth.trace.value import Context
from anywidth.trace.view_rules import (
    cat,
    channel_shuffle,
    chunk,
    expand,
    glu,
    index,
    matrix_transpose,
    movedim,
    pad,
    permute,
    pixel_shuffle,
    pixel_unshuffle,
    select,
    slice_,
    stack,
    transpose,
    unbind,
    unsqueeze,
    view,
)

Rule = Callable[[Context, Arguments], Any]


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


# Operations whose result is a layer's output.
MAKERS: dict[str, Rule] = {
    **_rows(convolution, "conv1d conv2d conv3d"),
    **_rows(transposed_convolution, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_rows(linear, "linear"),
}

RULES: dict[str, Rule] = {
    **MAKERS,
    **_rows(batch_norm, "batch_norm instance_norm"),
    **_rows(layer_norm, "layer_norm rms_norm"),
    **_rows(group_norm, "group_norm"),
    **_rows(prelu, "prelu"),
    **_rows(embedding, "embedding"),
    **_rows(weight_norm, "_weight_norm"),
    **_rows(recurrent, "gru lstm rnn_tanh rnn_relu"),
    **_rows(matmul, "matmul mm bmm"),
    **_rows(addmm, "addmm baddbmm"),
    **_rows(einsum, "einsum"),
    **_rows(attention, "scaled_dot_product_attention"),
    **_rows(
        elementwise,
        "add sub rsub mul div pow maximum minimum where neg abs exp log sqrt rsqrt reciprocal "
        "sin cos tanh sigmoid relu relu6 silu gelu elu selu celu leaky_relu hardtanh hardswish "
        "hardsigmoid mish softplus log_sigmoid hardshrink softshrink threshold "
        "rrelu clamp clamp_min clamp_max erf square round floor sign lerp addcmul softmax "
        "log_softmax _safe_softmax cumsum dropout feature_dropout alpha_dropout "
        "feature_alpha_dropout contiguous clone to _to_copy alias detach "
        "lift_fresh_copy type_as masked_fill fill zero eq ne lt le gt ge logical_not logical_and "
        "logical_or bitwise_not bitwise_and bitwise_or isnan zeros_like ones_like rand_like "
        "full_like empty_like randn_like bernoulli copy positive "
        "nan_to_num remainder fmod expm1 log1p",
    ),
    **_rows(
        constant, "new_zeros new_ones new_empty new_full zeros ones empty full arange rand randn"
    ),
    **_rows(nothing, "_assert_tensor_metadata"),
    **_rows(along_dims, "roll flip"),
    **_rows(
        reduction,
        "mean sum amax amin max min prod var std linalg_vector_norm norm logsumexp all any",
    ),
    **_rows(
        spatial,
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "_upsample_nearest_exact2d reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d",
    ),
    **_rows(view, "view reshape flatten unflatten _unsafe_view squeeze view_as reshape_as"),
    **_rows(permute, "permute"),
    **_rows(transpose, "transpose swapaxes swapdims t numpy_T"),
    **_rows(movedim, "movedim moveaxis"),
    **_rows(matrix_transpose, "mT adjoint"),
    **_rows(unsqueeze, "unsqueeze"),
    **_rows(expand, "expand expand_as broadcast_to"),
    **_rows(cat, "cat concat concatenate"),
    **_rows(stack, "stack"),
    **_rows(chunk, "chunk split split_with_sizes tensor_split"),
    **_rows(unbind, "unbind"),
    **_rows(select, "select"),
    **_rows(slice_, "slice narrow"),
    **_rows(index, "index"),
    **_rows(pad, "pad constant_pad_nd"),
    **_rows(pixel_shuffle, "pixel_shuffle"),
    **_rows(pixel_unshuffle, "pixel_unshuffle"),
    **_rows(channel_shuffle, "channel_shuffle native_channel_shuffle"),
    **_rows(glu, "glu"),
}
