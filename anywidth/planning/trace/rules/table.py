"""The table of rules: how channels pass through each operation.

A rule takes a cursor, which stands at the operation, and the arguments by their ATen names. It
says which axes shrink together, and returns the result's axes. An operation with no row fixes
whatever channels it touches: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Arguments
from typing import Any

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.rules import (
    elementwise,
    indexing,
    layer_calls,
    made_sizes,
    parts_of,
    products,
    recurrent,
    repeats,
    reshapes,
)

Rule = Callable[[Cursor, Arguments], Any]


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


# Operations whose result is a layer's output.
MAKERS: dict[str, Rule] = {
    **_rows(
        layer_calls.convolution,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    **_rows(layer_calls.linear, "linear"),
}

# Operations that sum over channels whatever their number, with weights or with each other.
PRODUCTS: dict[str, Rule] = {
    **MAKERS,
    **_rows(products.matmul, "matmul mm bmm mv dot vdot"),
    **_rows(products.addmm, "addmm baddbmm"),
    **_rows(products.einsum, "einsum"),
    **_rows(products.tensordot, "tensordot"),
    **_rows(products.attention, "scaled_dot_product_attention"),
    **_rows(products.grouped, "_grouped_mm transformers::grouped_mm_fallback"),
    **_rows(products.distances, "cdist"),
    **_rows(products.bilinear, "bilinear"),
    **_rows(layer_calls.deformed_convolution, "torchvision::deform_conv2d"),
    **_rows(recurrent.sequence, "gru lstm rnn_tanh rnn_relu"),
    **_rows(recurrent.cell, "gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell"),
}

# Operations that give the tensor they take, in another shape.
VIEWS: dict[str, Rule] = {
    **_rows(
        reshapes.view, "view reshape flatten unflatten _unsafe_view squeeze view_as reshape_as"
    ),
    **_rows(reshapes.permute, "permute"),
    **_rows(reshapes.transpose, "transpose swapaxes swapdims mT adjoint"),
    **_rows(reshapes.reverse_dims, "t numpy_T"),
    **_rows(reshapes.movedim, "movedim moveaxis"),
    **_rows(reshapes.unsqueeze, "unsqueeze"),
    **_rows(made_sizes.expand, "expand expand_as broadcast_to"),
}

# Operations that give rows of the tensor they take: the weights of some experts, say.
LOOKUPS: dict[str, Rule] = {
    **_rows(indexing.index, "index"),
    **_rows(indexing.index_select, "index_select"),
    **_rows(parts_of.without_dim, "select"),
}

RULES: dict[str, Rule] = {
    **PRODUCTS,
    **VIEWS,
    **LOOKUPS,
    **_rows(layer_calls.batch_norm, "batch_norm instance_norm"),
    **_rows(layer_calls.layer_norm, "layer_norm rms_norm"),
    **_rows(layer_calls.group_norm, "group_norm"),
    **_rows(layer_calls.prelu, "prelu"),
    **_rows(layer_calls.embedding, "embedding embedding_bag"),
    **_rows(layer_calls.weight_norm, "_weight_norm"),
    **_rows(
        elementwise.elementwise,
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
    **_rows(made_sizes.filled, "new_zeros new_ones new_empty new_full zeros ones empty full"),
    **_rows(made_sizes.constant, "arange rand randn"),
    **_rows(
        elementwise.fake_quantized,
        "fused_moving_avg_obs_fake_quant _fused_moving_avg_obs_fq_helper "
        "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine "
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    ),
    **_rows(
        elementwise.nothing,
        "_assert_tensor_metadata _assert_scalar sym_size sym_numel "
        "sym_constrain_range sym_constrain_range_for_size",
    ),
    **_rows(elementwise.along_dims, "roll flip"),
    **_rows(
        elementwise.reduction,
        "mean sum amax amin max min prod var std linalg_vector_norm norm logsumexp all any "
        "var_mean std_mean nanmean nansum median aminmax linalg_norm",
    ),
    **_rows(elementwise.compare, "cosine_similarity pairwise_distance"),
    **_rows(elementwise.difference, "mse_loss l1_loss smooth_l1_loss huber_loss"),
    **_rows(
        elementwise.transform,
        "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn "
        "fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift",
    ),
    **_rows(
        elementwise.spatial,
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
    **_rows(elementwise.unpool, "max_unpool2d max_unpool3d"),
    **_rows(elementwise.grid_sample, "grid_sampler"),
    **_rows(repeats.broadcast, "broadcast_tensors"),
    **_rows(repeats.repeat, "repeat tile"),
    **_rows(repeats.repeat_interleave, "repeat_interleave"),
    **_rows(reshapes.cat, "cat concat concatenate"),
    **_rows(reshapes.stack, "stack"),
    **_rows(parts_of.chunk, "chunk split split_with_sizes tensor_split"),
    **_rows(parts_of.without_dim, "unbind"),
    **_rows(parts_of.slice_, "slice narrow"),
    **_rows(indexing.gather, "gather take_along_dim"),
    **_rows(indexing.scatter, "scatter scatter_add scatter_reduce"),
    **_rows(indexing.index_add, "index_add index_copy index_reduce index_fill"),
    **_rows(indexing.index_put, "index_put"),
    **_rows(indexing.ordered, "topk sort argsort kthvalue mode argmax argmin"),
    **_rows(indexing.one_hot, "one_hot"),
    **_rows(indexing.regions, "torchvision::roi_align torchvision::roi_pool"),
    **_rows(repeats.windows, "unfold"),
    **_rows(repeats.im2col, "im2col"),
    **_rows(repeats.col2im, "col2im"),
    **_rows(reshapes.as_complex, "view_as_complex"),
    **_rows(reshapes.as_real, "view_as_real"),
    **_rows(reshapes.pad, "pad constant_pad_nd"),
    **_rows(reshapes.pixel_shuffle, "pixel_shuffle"),
    **_rows(reshapes.pixel_unshuffle, "pixel_unshuffle"),
    **_rows(reshapes.channel_shuffle, "channel_shuffle native_channel_shuffle"),
    **_rows(reshapes.glu, "glu"),
}

# Operations that give each entry of their result from the same entry of what they take.
ELEMENTWISE = {name for name, rule in RULES.items() if rule is elementwise.elementwise}

# Operations that make a tensor of one number.
FILLED = {name for name, rule in RULES.items() if rule is made_sizes.filled}
FILLED |= {"ones_like", "zeros_like", "full_like"}
