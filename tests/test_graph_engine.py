"""The graph engine and the kernels against the eager engine, where there is a GPU."""

import pytest
import torch

import anywidth as aw
from anywidth.fast_layers import use_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), (torch.bfloat16, 1e-3)])
def test_fifty_steps_of_graphs_give_the_losses_of_the_eager_engine(
    dtype: torch.dtype | None, tolerance: float
) -> None:
    from benchmarks.engine_check import losses

    plain = losses("eager", False, dtype, "mobilenet_v1")
    assert plain.isfinite().all()
    assert (plain - losses("graphs", False, dtype, "mobilenet_v1")).abs().max() <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-4), (torch.bfloat16, 0.03)])
def test_kernels_give_the_losses_of_plain_layers(
    dtype: torch.dtype | None, tolerance: float
) -> None:
    """Over a few steps: training makes any difference in rounding grow."""
    from benchmarks.engine_check import losses

    plain = losses("eager", False, dtype, "mobilenet_v1", steps=5)
    assert (plain - losses("graphs", True, dtype, "mobilenet_v1", steps=5)).abs().max() <= tolerance


def test_a_network_that_cannot_be_captured_warns_once_and_trains_on() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 16)
            self.second = torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).relu()
            if not torch.compiler.is_exporting():
                hidden.sum().item()  # a host synchronisation: not allowed while capturing
            return self.second(hidden)

    model = Reads()
    aw.slimmable(model, example_input=torch.randn(2, 8))
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = aw.SandwichStep(model, optimizer, torch.nn.functional.cross_entropy, engine="graphs")
    x, y = torch.randn(32, 8, device="cuda"), torch.randint(0, 4, (32,), device="cuda")
    with pytest.warns(UserWarning, match="cannot be captured"):
        step(x, y)
    before = [p.clone() for p in model.parameters()]
    step(x, y)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_extracted_network_has_no_fast_path_left() -> None:
    model = aw.models.mobilenet_v2(num_classes=10, total_stride=8)
    aw.slimmable(model, example_input=torch.randn(2, 3, 32, 32), verified=False)
    use_kernels(model.cuda())
    with pytest.warns(UserWarning, match="not calibrated"):
        small = aw.extract(model, 0.5)
    assert {type(m).__module__.partition(".")[0] for m in small.modules()} <= {"torch", "anywidth"}
    assert not any("_slow_class" in m.__dict__ for m in small.modules())
