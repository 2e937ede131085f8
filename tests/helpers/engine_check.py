"""Losses and gradients of both engines on a GPU, with our kernels or PyTorch's layers.

Graphs replay the same kernels, so the losses of 50 steps must agree closely. Our kernels round in
another order, and training amplifies such differences. Therefore their gradients are compared with
float64 after one step, and must be about as close to it as those of PyTorch's own layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import anywidth as aw
from anywidth.app.model_spec import load_model

NETWORKS = ("mobilenet_v1", "mobilenet_v2", "torchvision:resnet18")
# The largest allowed difference of the losses of both engines in any of 50 steps.
LOSSES = {None: 1e-5, torch.bfloat16: 1e-3}
# The largest allowed error of the kernels, relative to PyTorch's error.
TIMES = 3.0


def make_step(
    engine: str,
    kernels: bool,
    autocast: torch.dtype | None,
    name: str,
    dtype: torch.dtype = torch.float32,
) -> aw.SandwichStep:
    # Otherwise even two runs of the eager engine differ, and 50 steps amplify the difference.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    options = {} if ":" in name else {"total_stride": 8}
    model = load_model(name, num_classes=10, **options)
    aw.slimmable(model, example_input=torch.randn(2, 3, 32, 32), verified=False)
    model.to("cuda", dtype)
    return aw.SandwichStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.002),
        F.cross_entropy,
        widths=aw.Sampling(lattice=4, seed=3),
        autocast=autocast,
        engine=engine,
        kernels=kernels,
    )


def batch(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (64,), device="cuda", generator=generator)
    images = torch.randn(64, 3, 32, 32, device="cuda", generator=generator)
    return (images + labels.view(-1, 1, 1, 1) / 5).to(dtype), labels


def losses(
    engine: str, kernels: bool, autocast: torch.dtype | None, name: str, steps: int = 50
) -> Tensor:
    """The losses of every width of every step."""
    step = make_step(engine, kernels, autocast, name)
    generator = torch.Generator("cuda").manual_seed(1)
    seen = []
    for _ in range(steps):
        result = step(*batch(generator))
        seen.append(torch.stack([loss.float() for loss in result.losses]))
    return torch.stack(seen).cpu()


def gradients(
    engine: str,
    kernels: bool,
    autocast: torch.dtype | None,
    name: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The gradients of one step over four widths, concatenated over all parameters."""
    step = make_step(engine, kernels, autocast, name, dtype)
    step(*batch(torch.Generator("cuda").manual_seed(1), dtype))
    found = [p.grad.double().flatten() for p in step.model.parameters() if p.grad is not None]
    return torch.cat(found).cpu()


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
