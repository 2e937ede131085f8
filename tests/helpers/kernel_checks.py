"""Compare the GPU kernels with float64 PyTorch on a GPU, and count what a new width compiles."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anywidth.training.gpu import kernels
from anywidth.training.gpu.kernels.compilation import KERNELS

# Allowed errors relative to the largest value: rounding of the output, then float32 sums.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 5e-6}
SUM_TOLERANCE = 1e-5
FLIPPED = 5e-4  # for sums over values of which a few may round either way
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Check:
    """One call to compare with float64: a convolution, a batch norm, or both at once.

    The convolution of an image reads three channels and makes the channels of ``shape``.
    """

    operation: str
    dtype: str
    shape: tuple[int, int, int, int]
    kernel: int = 0
    stride: int = 0
    activation: str = ""


def checks() -> Iterator[list[Check]]:
    """Groups of checks that need the same compiled kernels."""
    aligned = [(3, 8, 7, 7), (2, 40, 14, 15), (4, 256, 7, 8), (8, 64, 57, 56)]
    other = [(1, 1, 1, 1), (5, 3, 5, 7), (2, 33, 8, 5), (3, 257, 7, 9)]
    # Batch norm uses other kernels for more than 4,096 pixels.
    many_pixels = [(8, 40, 23, 24), (9, 3, 31, 33), (5, 257, 30, 31)]
    sizes = [(kernel, stride) for kernel in (3, 5) for stride in (1, 2)]
    for kernel, stride in sizes:
        for shapes in (aligned, other):
            yield [Check("depthwise", "bf16", shape, kernel, stride) for shape in shapes]
    for dtype, kernel, stride in [("fp32", 3, 1), ("fp32", 5, 2), ("fp16", 3, 2), ("fp16", 5, 1)]:
        yield [Check("depthwise", dtype, shape, kernel, stride) for shape in aligned]
    for kernel, stride in sizes:
        for activation in ("none", "silu"):  # without kinks, where rounding may decide the side
            shapes = [(2, 40, 14, 15), (8, 64, 57, 56), *many_pixels]
            yield [Check("norm, depthwise", "bf16", s, kernel, stride, activation) for s in shapes]
    yield [Check("norm, depthwise", "fp32", s, 3, 1, "silu") for s in many_pixels]
    for stride in (1, 2):
        for shapes in (aligned, other):
            yield [Check("stem", "bf16", shape, 3, stride) for shape in shapes]
        yield [Check("stem", dtype, s, 3, stride) for dtype in ("fp16", "fp32") for s in aligned]
    for activation in kernels.ACTIVATIONS:
        for dtype in NAMES:
            shapes = aligned + other[1:] + many_pixels if dtype == "bf16" else aligned
            yield [Check("batch norm", dtype, s, activation=activation) for s in shapes]


def channels_last(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal random numbers."""
    x = torch.randn(shape, dtype=dtype, device="cuda")
    return x.contiguous(memory_format=torch.channels_last)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest error relative to the largest value; infinite if there is a NaN."""
    largest = expected.abs().max().clamp(min=1e-3)
    share = float((actual.double() - expected).abs().max() / largest)
    return share if share == share else float("inf")


def both_versions(check: Check) -> tuple[list[Tensor], Any, Any, list[Tensor]]:
    """Random parameters, the float64 function, ours, and the running statistics of each."""
    channels, half = check.shape[1], check.kernel // 2
    if check.operation == "depthwise":
        filters = torch.randn(channels + 5, 1, check.kernel, check.kernel, device="cuda")

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            weight = weight[:channels]
            return functional.conv2d(x, weight, None, check.stride, half, groups=channels)

        def our_convolve(x: Tensor, weight: Tensor) -> Tensor:
            return kernels.depthwise_conv2d(x, weight, check.stride, half)

        return [filters], convolve, our_convolve, []
    if check.operation == "norm, depthwise":
        return deferred_versions(check)
    if check.operation == "stem":
        return picture_versions(check)

    running = [
        torch.zeros(2, channels, dtype=d, device="cuda") for d in (torch.double, torch.float)
    ]

    def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, variance = running[0]
        z = functional.batch_norm(
            x, mean, variance, weight[:channels], bias[:channels], True, 0.5, 1e-5
        )
        return z if check.activation == "none" else getattr(functional, check.activation)(z)

    def our_normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, variance = running[1]
        norm = kernels.BatchNorm(weight, bias, check.activation, mean, variance, momentum=0.5)
        return kernels.batch_norm_act(x, norm)

    parameters = [torch.randn(channels + 5, device="cuda") for _ in range(2)]
    return parameters, normalize, our_normalize, running


def picture_versions(check: Check) -> tuple[list[Tensor], Any, Any, list[Tensor]]:
    """The convolution of an image; filters are rounded to its type. Statistics as below."""
    channels = check.shape[1]
    found = torch.zeros(2, 2, channels, dtype=torch.double, device="cuda")

    def exact(x: Tensor, filters: Tensor) -> Tensor:
        rounding = filters.detach().to(NAMES[check.dtype]).double() - filters.detach()
        return functional.conv2d(x, (filters + rounding)[:channels], None, check.stride, 1)

    def ours(x: Tensor, filters: Tensor) -> Tensor:
        y, partial = kernels.stem_conv2d_with_statistics(x, filters, channels, check.stride, 1)
        compare_statistics(y.detach(), partial, found)
        return y

    return [torch.randn(channels + 5, 3, 3, 3, device="cuda")], exact, ours, list(found)


def compare_statistics(y: Tensor, partial: Tensor | None, found: Tensor) -> None:
    """Fill in the mean and variance of an output, and those computed while it was written."""
    if partial is None:
        return
    whole = y.double()
    found[0] = torch.stack([whole.mean((0, 2, 3)), whole.var((0, 2, 3), correction=0)])
    ones, zeros = torch.ones(y.shape[1], device="cuda"), torch.zeros(y.shape[1], device="cuda")
    after = kernels.deferred_norm(y, kernels.BatchNorm(ones, zeros), partial)
    found[1] = after.terms[:2]


class RoundedGradient(torch.autograd.Function):
    """The identity; its gradient is rounded to another type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def deferred_versions(check: Check) -> tuple[list[Tensor], Any, Any, list[Tensor]]:
    """A norm computed by the convolution after it, and the statistics of the output."""
    channels, half = check.shape[1], check.kernel // 2
    size = channels + 5
    found = torch.zeros(2, 2, channels, dtype=torch.double, device="cuda")

    def activate(z: Tensor) -> Tensor:
        return z if check.activation == "none" else getattr(functional, check.activation)(z)

    def exact(x: Tensor, weight: Tensor, bias: Tensor, filters: Tensor) -> Tensor:
        z = functional.batch_norm(
            x, None, None, weight[:channels], bias[:channels], True, 0.5, 1e-5
        )
        # The gradient between the two is written to memory, so even a perfect kernel rounds it.
        z = RoundedGradient.apply(activate(z), NAMES[check.dtype])
        return functional.conv2d(z, filters[:channels], None, check.stride, half, groups=channels)

    def ours(x: Tensor, weight: Tensor, bias: Tensor, filters: Tensor) -> Tensor:
        norm = kernels.deferred_norm(x, kernels.BatchNorm(weight, bias, check.activation))
        y, partial = kernels.depthwise_conv2d_with_statistics(x, filters, check.stride, half, norm)
        compare_statistics(y.detach(), partial, found)
        return y

    parameters = [torch.randn(size, device="cuda") for _ in range(2)]
    parameters.append(torch.randn(size, 1, check.kernel, check.kernel, device="cuda"))
    return parameters, exact, ours, list(found)


def near_kink(check: Check, inputs: list[Tensor]) -> Tensor:
    """Mark values so close to a kink of the activation that rounding decides the slope."""
    kinks = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}
    if check.activation not in kinks:
        return torch.zeros((), dtype=torch.bool, device="cuda")
    x, weight, bias = (t.detach() for t in inputs)
    channels = x.shape[1]
    z = functional.batch_norm(x, None, None, weight[:channels], bias[:channels], True, 0.5, 1e-5)
    return torch.stack([(z - kink).abs() < 1e-4 for kink in kinks[check.activation]]).any(0)


def compare(check: Check) -> dict[str, Any]:
    """Run one check; returns the errors by quantity."""
    images, channels, height, width = check.shape
    is_picture = check.operation == "stem"
    shape = (images, 3 if is_picture else channels, height, width)
    x = channels_last(*shape, dtype=NAMES[check.dtype]).requires_grad_(not is_picture)
    parameters, exact, ours, running = both_versions(check)
    inputs = [x, *(p.requires_grad_() for p in parameters)]
    exact_inputs = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    expected = exact(*exact_inputs)
    dy = channels_last(*expected.shape, dtype=x.dtype)
    dy[near_kink(check, exact_inputs)] = 0
    names = ["df"] if is_picture else ["dx", "dw", "db", "df"]
    first = int(is_picture)  # data has no gradient
    gradients = torch.autograd.grad(expected, exact_inputs[first:], dy.double())
    # In this mode, memory that was never written holds NaN.
    torch.use_deterministic_algorithms(True)
    y = ours(*inputs)
    actual = torch.autograd.grad(y, inputs[first:], dy)
    torch.use_deterministic_algorithms(False)

    tolerance = TOLERANCE[x.dtype]
    errors = {"y": (error(y.detach(), expected.detach()), tolerance)}
    limits = {"dx": tolerance}
    if check.operation == "norm, depthwise":
        # A tiny error in float32 may round the gradient between the two the other way.
        limits = {"dx": 2 * tolerance, "dw": FLIPPED, "db": FLIPPED}
    for name, one, other in zip(names, actual, gradients, strict=False):
        errors[name] = (error(one, other), limits.get(name, SUM_TOLERANCE))
    if running:
        errors["running"] = (error(running[1], running[0]), SUM_TOLERANCE)
    passed = all(value <= limit for value, limit in errors.values())
    return asdict(check) | {"passed": passed, "errors": {k: v for k, (v, _) in errors.items()}}


def compare_group(group: list[Check]) -> list[dict[str, Any]]:
    """Run a group of checks in its own process."""
    torch.manual_seed(time.time_ns() % 2**31)
    return [compare(check) for check in group]


def check_everything(processes: int) -> list[dict[str, Any]]:
    """Compile and check in parallel; compiled kernels stay in Triton's cache on disk."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [row for rows in pool.map(compare_group, checks()) for row in rows]


def variants() -> Counter[str]:
    """Compiled variants of every kernel in this process."""
    return Counter(
        {
            name: sum(len(cache[0]) for cache in kernel.device_caches.values())
            for name, kernel in KERNELS.items()
        }
    )


def train_once(channels: int) -> None:
    """A depthwise layer and its batch norm, forward and backward, over few and many pixels."""
    for size in (14, 28):
        train_layer(channels_last(16, channels, size, size).requires_grad_())
    torch.cuda.synchronize()


def train_layer(x: Tensor) -> None:
    filters = torch.randn(512, 1, 3, 3, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(512, device="cuda", requires_grad=True) for _ in range(2))
    taps = torch.randn(512, 3, 3, 3, device="cuda", requires_grad=True)
    picture = channels_last(x.shape[0], 3, *x.shape[2:])
    y, _ = kernels.stem_conv2d_with_statistics(picture, taps, x.shape[1], 1, 1)
    y.backward(torch.ones_like(y))
    y = kernels.depthwise_conv2d(x, filters, 1, 1)
    norm = kernels.BatchNorm(weight, bias, "relu")
    z = kernels.batch_norm_act(y, norm)
    z.backward(torch.ones_like(z))
    before = kernels.deferred_norm(x, norm)
    y, partial = kernels.depthwise_conv2d_with_statistics(x, filters, 1, 1, before)
    z = kernels.batch_norm_act(y, norm, partial)
    z.backward(torch.ones_like(z))


def variants_of_new_widths() -> tuple[Counter[str], Counter[str]]:
    """Compiled variants before and after ten widths were used for the first time."""
    train_once(512)
    before = variants()
    for channels in (128, 136, 160, 200, 248, 256, 320, 328, 440, 496):
        train_once(channels)
    return before, variants()
