"""On a GPU: the graph engine and the kernels give what the eager engine gives, step by step.

python3 -m benchmarks.engine_check
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import anywidth as aw
from anywidth.fast_layers import use_kernels


def losses(
    engine: str, fast: bool, dtype: torch.dtype | None, name: str, steps: int = 50
) -> torch.Tensor:
    # Otherwise even the eager engine differs from itself, and 50 steps make the most of it.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = getattr(aw.models, name)(num_classes=10, total_stride=8)
    aw.slimmable(model, example_input=torch.randn(2, 3, 32, 32), verified=False)
    model.cuda().to(memory_format=torch.channels_last)
    use_kernels(model, fast)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    sampling = aw.Sampling(lattice=4, seed=3)
    step = aw.SandwichStep(
        model, optimizer, F.cross_entropy, widths=sampling, autocast=dtype, engine=engine
    )
    generator = torch.Generator("cuda").manual_seed(1)
    seen = []
    for _ in range(steps):
        labels = torch.randint(0, 10, (64,), device="cuda", generator=generator)
        images = torch.randn(64, 3, 32, 32, device="cuda", generator=generator)
        images += labels.view(-1, 1, 1, 1) / 5
        images = images.contiguous(memory_format=torch.channels_last)
        seen.append(torch.stack([loss.float() for loss in step(images, labels).losses]))
    return torch.stack(seen).cpu()


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    worst = 0
    for name in ("mobilenet_v1", "mobilenet_v2"):
        for dtype, tolerance in ((None, 2e-4), (torch.bfloat16, 0.05)):
            plain = losses("eager", False, dtype, name)
            again = losses("eager", False, dtype, name)
            spread = (plain - again).abs().max().item()
            for engine, fast in (("graphs", False), ("eager", True), ("graphs", True)):
                found = losses(engine, fast, dtype, name)
                error = (found - plain).abs()
                passed = error.max().item() <= max(tolerance, 3 * spread)
                worst += not passed
                print(
                    f"{name} {dtype} {engine:7} kernels={fast}: first {error[0].max():.2e} "
                    f"last {error[-1].max():.2e} max {error.max():.2e} (eager against itself "
                    f"{spread:.2e}) {'PASS' if passed else 'FAIL'}",
                    flush=True,
                )
    raise SystemExit(worst > 0)


if __name__ == "__main__":
    main()
