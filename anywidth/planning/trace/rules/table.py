"""The table of rules: how channels pass through each operation, one row an operation.

A rule takes the trace's context and the operation's arguments by their ATen names, says which
axes shrink together, and returns the result's axes. An operation with no row fixes whatever
channels it touches: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Arguments
from typing import Any

from anywidth.planning.trace.rules.elementwise import (
    along_dims,
    compare,
    constant,
    elementwise,
    grid_sample,
    nothing,
    reduction,
    spatial,
    transform,
    unpool,
)
from anywidth.planning.trace.rules.layer_calls import (
    batch_norm,
    convolution,
    embedding,
    embedding_bag,
    group_norm,
    layer_norm,
    linear,
    prelu,
    recurrent,
    transposed_convolution,
    weight_norm,
)
from anywidth.planning.trace.rules.products import addmm, attention, einsum, matmul
from anywidth.planning.trace.rules.repeats import (
    broadcast,
    col2im,
    expand,
    im2col,
    repeat,
    repeat_interleave,
    windows,
)
from anywidth.planning.trace.rules.reshapes import (
    as_complex,
    as_real,
    cat,
    channel_shuffle,
    chunk,
    glu,
    index,
    index_select,
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
from anywidth.planning.trace.value import Context

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
    **_rows(embedding_bag, "embedding_bag"),
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
        "nan_to_num remainder fmod expm1 log1p asin acos atan atan2 tan sinh cosh asinh acosh "
        "atanh erfc erfinv exp2 log2 log10 logaddexp logit xlogy sinc hypot ceil trunc frac sgn "
        "signbit copysign addcdiv fmax fmin clip cumprod logcumsumexp multiply subtract divide "
        "true_divide floor_divide negative absolute deg2rad rad2deg isfinite isinf logical_xor "
        "bitwise_xor __and__ __or__ __xor__ complex polar real imag angle conj triu tril",
    ),
    **_rows(
        constant, "new_zeros new_ones new_empty new_full zeros ones empty full arange rand randn"
    ),
    **_rows(nothing, "_assert_tensor_metadata"),
    **_rows(along_dims, "roll flip"),
    **_rows(
        reduction,
        "mean sum amax amin max min prod var std linalg_vector_norm norm logsumexp all any "
        "var_mean std_mean nanmean nansum median aminmax linalg_norm",
    ),
    **_rows(compare, "cosine_similarity pairwise_distance"),
    **_rows(
        transform,
        "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn "
        "fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift",
    ),
    **_rows(
        spatial,
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
        "max_pool3d_with_indices upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d",
    ),
    **_rows(unpool, "max_unpool2d max_unpool3d"),
    **_rows(grid_sample, "grid_sampler"),
    **_rows(view, "view reshape flatten unflatten _unsafe_view squeeze view_as reshape_as"),
    **_rows(permute, "permute"),
    **_rows(transpose, "transpose swapaxes swapdims t numpy_T"),
    **_rows(movedim, "movedim moveaxis"),
    **_rows(matrix_transpose, "mT adjoint"),
    **_rows(unsqueeze, "unsqueeze"),
    **_rows(expand, "expand expand_as broadcast_to"),
    **_rows(broadcast, "broadcast_tensors"),
    **_rows(repeat, "repeat tile"),
    **_rows(repeat_interleave, "repeat_interleave"),
    **_rows(cat, "cat concat concatenate"),
    **_rows(stack, "stack"),
    **_rows(chunk, "chunk split split_with_sizes tensor_split"),
    **_rows(unbind, "unbind"),
    **_rows(select, "select"),
    **_rows(slice_, "slice narrow"),
    **_rows(index, "index"),
    **_rows(index_select, "index_select"),
    **_rows(windows, "unfold"),
    **_rows(im2col, "im2col"),
    **_rows(col2im, "col2im"),
    **_rows(as_complex, "view_as_complex"),
    **_rows(as_real, "view_as_real"),
    **_rows(pad, "pad constant_pad_nd"),
    **_rows(pixel_shuffle, "pixel_shuffle"),
    **_rows(pixel_unshuffle, "pixel_unshuffle"),
    **_rows(channel_shuffle, "channel_shuffle native_channel_shuffle"),
    **_rows(glu, "glu"),
}
