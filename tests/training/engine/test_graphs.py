"""The graph engine and the kernels against the eager engine, where there is a GPU."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from command_line import HERE, torchrun
from engine_check import LOSSES, NETWORKS, TIMES, distance, gradients, losses
from torch.utils.checkpoint import checkpoint

import anywidth as aw
from anywidth.planning.cuts import is_converted
from anywidth.slimming.norm_statistics import tracked_statistics
from anywidth.training.gpu import fast_convolutions
from anywidth.training.gpu.fast_layers import use_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_fifty_steps_of_graphs_give_the_losses_of_the_eager_engine(
    autocast: torch.dtype | None, name: str
) -> None:
    plain = losses("eager", False, autocast, name)
    assert plain.isfinite().all()
    graphs = losses("graphs", False, autocast, name)
    assert (plain - graphs).abs().max() <= LOSSES[autocast]


@pytest.mark.parametrize("products", [False, True], ids=["", "products"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_gradients_by_kernels_are_as_exact_as_those_of_plain_layers(
    autocast: torch.dtype | None, name: str, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_convolutions, "USES_PRODUCTS", products)
    exact = gradients("eager", False, None, name, torch.float64)
    plain = distance(gradients("eager", False, autocast, name), exact)
    for engine in ("eager", "graphs"):
        assert distance(gradients(engine, True, autocast, name), exact) <= TIMES * plain


def test_nested_batches_and_outputs_are_captured() -> None:
    """Observations, actions and returns in; policy and value out."""

    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(8, 32)
            self.policy, self.value = torch.nn.Linear(32, 4), torch.nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x).relu()
            return self.policy(hidden), self.value(hidden).squeeze(1)

    def loss(output: Any, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, value = output
        policy = torch.nn.functional.cross_entropy(logits, targets["actions"])
        return policy + (value - targets["returns"]).square().mean()

    def distill(output: Any, teacher: Any, *, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss((output[0], output[1] - teacher[1]), targets)

    weights = []
    for engine in ("eager", "graphs"):
        torch.manual_seed(0)
        model = Policy()
        aw.slimmable(model, example_input=torch.randn(2, 8))
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = aw.SandwichStep(model, optimizer, loss, distill, autocast=None, engine=engine)
        for seed in range(5):
            generator = torch.Generator("cuda").manual_seed(seed)
            targets = {
                "actions": torch.randint(0, 4, (64,), device="cuda", generator=generator),
                "returns": torch.randn(64, device="cuda", generator=generator),
            }
            step(torch.randn(64, 8, device="cuda", generator=generator), targets)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).double())
    assert distance(weights[1], weights[0]) < 1e-6


def test_warming_up_leaves_weights_and_statistics_as_they_were() -> None:
    model = aw.models.mobilenet_v1(num_classes=10, total_stride=8)
    aw.slimmable(model, example_input=torch.randn(2, 3, 32, 32), verified=False)
    model.cuda()
    step = aw.SandwichStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy
    )
    x, y = torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(0, 10, (32,), device="cuda")

    def everything() -> list[torch.Tensor]:
        entries = [t for e in tracked_statistics(model) for t in (e.running_mean, e.running_var)]
        return [t.clone() for t in (*model.state_dict().values(), *entries)]

    before = everything()
    step.warm_up([1.0, 0.25, 0.5], x, y)
    assert len(step.engine.captured) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert aw.calibrated_widths(model) == [1.0]
    step(x, y)
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    model.eval()
    with aw.at_width(model, 0.25):
        model(x)  # its statistics were tracked by a replayed graph


def test_only_the_first_capture_waits_and_frees_unused_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed, whole = [], torch.cuda.empty_cache
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: (freed.append(1), whole()))
    weights = []
    for engine in ("eager", "graphs"):
        torch.manual_seed(0)
        model = aw.models.mobilenet_v1(num_classes=10, total_stride=8)
        aw.slimmable(model, example_input=torch.randn(2, 3, 32, 32), verified=False)
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = torch.nn.functional.cross_entropy
        step = aw.SandwichStep(model, optimizer, loss, autocast=None, engine=engine)
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            images = torch.randn(32, 3, 32, 32, device="cuda", generator=generator)
            step(images, torch.arange(32, device="cuda") % 10)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).double())
    assert len(step.engine.captured) > 4
    assert len(freed) == 1
    assert distance(weights[1], weights[0]) < 1e-3


def test_a_network_that_cannot_be_captured_warns_once_and_trains_on() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 16)
            self.second = torch.nn.Linear(16, 4)
            self.dropout = torch.nn.Dropout(0.5)  # draws from the generator of the device

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.dropout(self.first(x).relu())
            if not torch.compiler.is_exporting():
                hidden.sum().item()  # a host synchronisation: not allowed while capturing
            return self.second(hidden)

    model = Reads()
    aw.slimmable(model, example_input=torch.randn(2, 8))
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = aw.SandwichStep(model, optimizer, torch.nn.functional.cross_entropy, engine="graphs")
    x, y = torch.randn(32, 8, device="cuda"), torch.randint(0, 4, (32,), device="cuda")
    with pytest.warns(UserWarning, match="captured") as seen:
        step(x, y)
    assert len(seen) == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    before = [p.clone() for p in model.parameters()]
    step(x, y)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_widths_are_captured_while_a_loader_pins_memory() -> None:
    """Its thread allocates at the same time, which a capture of the usual kind forbids."""
    model = aw.models.mobilenet_v1(num_classes=10)
    aw.slimmable(model, example_input=torch.randn(2, 3, 32, 32), verified=False)
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = aw.SandwichStep(model, optimizer, torch.nn.functional.cross_entropy, engine="graphs")
    images, labels = torch.randn(64 * 12, 3, 32, 32), torch.randint(0, 10, (64 * 12,))
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(
        data, 64, num_workers=2, pin_memory=True, persistent_workers=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in loader:
            step(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
    assert len(step.engine.captured) > 12


def test_extracted_network_has_no_fast_path_left() -> None:
    model = aw.models.mobilenet_v2(num_classes=10, total_stride=8)
    aw.slimmable(model, example_input=torch.randn(2, 3, 32, 32), verified=False)
    use_kernels(model.cuda())
    with pytest.warns(UserWarning, match="calibrated"):
        small = aw.extract(model, 0.5)
    assert {type(m).__module__.partition(".")[0] for m in small.modules()} <= {"torch", "anywidth"}
    assert not is_converted(small)


def test_two_ranks_on_graphs_end_in_the_weights_of_one(tmp_path: Path) -> None:
    done = torchrun(HERE / "two_ranks.py", tmp_path, "cuda")
    assert done.returncode == 0, done.stderr[-3000:]
    model, widths = two_ranks.train(rank=0, world_size=1, device="cuda")
    with torch.serialization.safe_globals([aw.ChannelConfig]):
        ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for rank in ranks:
        assert rank["widths"] == widths
        for name, tensor in model.cpu().state_dict().items():
            torch.testing.assert_close(rank["weights"][name], tensor, atol=1e-5, rtol=1e-4)


def test_checkpointed_blocks_and_volumes_are_captured() -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv3d(3, 16, 3, padding=1)
            self.inner = torch.nn.Sequential(torch.nn.Conv3d(16, 16, 1), torch.nn.ReLU())
            self.last = torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.inner, self.first(x), use_reentrant=False)
            return self.last(hidden.mean((2, 3, 4)))

    def trained(engine: Any) -> torch.Tensor:
        torch.manual_seed(0)
        torch.backends.cudnn.allow_tf32 = False
        model = Checkpointed()
        aw.slimmable(model, example_input=torch.randn(2, 3, 4, 4, 4))
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy
        step = aw.SandwichStep(model, optimizer, loss, autocast=None, engine=engine)
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(8, 3, 4, 4, 4, device="cuda", generator=generator)
            step(x, torch.arange(8, device="cuda") % 4)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(trained("graphs"), trained("eager"), atol=1e-5, rtol=1e-4)
