"""One training step over all sampled widths."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_networks import PIXELS, converted, images_and_labels, tiny, without_norms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anywidth as aw
from anywidth.training.engine.passes import detached

# Losses of the widest, the narrowest and two random widths, at steps 0, 1, ... of `golden_run`.
GOLDEN = [
    [2.24739217, 2.28570023, 2.27271152, 2.26322622],
    [2.26661980, 2.27616344, 2.27312929, 2.26270702],
    [2.25605334, 2.26743469, 2.25441455, 2.25441455],
    [2.33505362, 2.26259092, 2.23704458, 2.23704458],
    [2.44621621, 2.26319631, 2.25913624, 2.24613439],
    [2.59326503, 2.25703928, 2.23191579, 2.24086496],
    [2.52356671, 2.26411447, 2.23770208, 2.24775787],
    [2.45831188, 2.27084339, 2.25731572, 2.24926124],
    [2.28727120, 2.27805637, 2.25766949, 2.27568990],
    [2.38976165, 2.27572243, 2.26477329, 2.25818658],
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def golden_run(dtype: torch.dtype, steps: int = 10) -> list[list[float]]:
    torch.manual_seed(0)
    model = converted().to(dtype)
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy, seed=3, weights="paper")
    losses = []
    for number in range(steps):
        images, labels = images_and_labels(16, seed=number)
        losses.append([float(loss) for loss in step(images.to(dtype), labels).losses])
    return losses


def test_a_seeded_run_gives_the_losses_on_record() -> None:
    """In float64, so that the order in which a processor adds up does not show."""
    found = golden_run(torch.float64)
    assert len(found) == len(GOLDEN)
    for losses, expected in zip(found, GOLDEN, strict=True):
        assert losses == pytest.approx(expected, abs=1e-6)


def test_float32_stays_close_to_the_record() -> None:
    for losses, expected in zip(golden_run(torch.float32), GOLDEN, strict=True):
        assert losses == pytest.approx(expected, abs=1e-3)


def test_the_step_is_algorithm_1() -> None:
    """Written out with ordinary PyTorch around `at_width`, to the last bit."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(converted())
    by_step, by_hand = models
    step = aw.SandwichStep(by_step, sgd(by_step), F.cross_entropy, seed=1, weights="paper")
    optimizer = sgd(by_hand)
    by_hand.train()
    for number in range(5):
        images, labels = images_and_labels(16, seed=number)
        step(images, labels)
        widths = aw.sample_widths(by_hand, number, aw.Sampling(seed=1))
        optimizer.zero_grad()
        logits = by_hand(images)
        F.cross_entropy(logits, labels).backward()
        soft_labels = logits.detach().softmax(1)
        for width in widths[1:]:
            with aw.at_width(by_hand, width):
                narrow = by_hand(images)
            F.cross_entropy(narrow, soft_labels).backward()
        optimizer.step()
    assert step.count == 5
    hand = by_hand.state_dict()
    for name, tensor in by_step.state_dict().items():
        assert torch.equal(tensor, hand[name]), name


def test_without_distillation_every_width_learns_the_labels() -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model, lr=0.0), F.cross_entropy, distill=None)
    images, labels = images_and_labels(16)
    result = step(images, labels)
    for loss, output in zip(result.losses, result.outputs, strict=True):
        torch.testing.assert_close(loss, F.cross_entropy(output, labels))


@pytest.mark.parametrize("truth", [0.0, 0.25, 1.0])
def test_truth_mixes_soft_and_true_labels(truth: float) -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model, lr=0.0), F.cross_entropy, truth=truth)
    images, labels = images_and_labels(16)
    result = step(images, labels)
    torch.testing.assert_close(result.losses[0], F.cross_entropy(result.outputs[0], labels))
    for loss, output in list(zip(result.losses, result.outputs, strict=True))[1:]:
        soft = aw.soft_cross_entropy(output, result.outputs[0])
        expected = (1 - truth) * soft + truth * F.cross_entropy(output, labels)
        torch.testing.assert_close(loss, expected)


def test_a_step_never_reads_a_value_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy)
    images, labels = images_and_labels(16)
    step(images, labels)

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError("a step waited for the device")

    for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    result = step(images, labels)
    monkeypatch.undo()
    assert all(loss.isfinite() for loss in result.losses)


def test_results_carry_no_graph_and_the_width_is_put_back() -> None:
    model = converted().eval()
    aw.set_width(model, 0.5)
    result = aw.SandwichStep(model, sgd(model), F.cross_entropy)(*images_and_labels(8))
    assert model.training
    assert model[0].out_channels == 8  # type: ignore[index]
    assert [len(result.widths), len(result.losses), len(result.outputs)] == [4, 4, 4]
    assert not any(t.requires_grad for t in [*result.losses, *result.outputs])


def test_the_hook_sees_complete_gradients() -> None:
    model = converted()
    norms: list[float] = []

    def clip() -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    aw.SandwichStep(model, optimizer, F.cross_entropy, after_backward=clip)(*images_and_labels(8))
    moved = sum(float((p - before[n]).detach().pow(2).sum()) for n, p in model.named_parameters())
    assert norms[0] > 0.01
    assert moved**0.5 == pytest.approx(0.01, rel=1e-3)


def test_autocast_runs_layers_in_bfloat16_and_losses_in_float32() -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy, autocast=torch.bfloat16)
    result = step(*images_and_labels(16))
    assert all(output.dtype == torch.bfloat16 for output in result.outputs)
    assert all(loss.dtype == torch.float32 for loss in result.losses)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())  # type: ignore[union-attr]


class Checkpointed(nn.Module):
    """Computes its activations anew in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny()
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.body(x)  # type: ignore[no-any-return]


def test_activation_checkpointing_runs_backward_at_the_same_width() -> None:
    images, labels = images_and_labels(8)
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = Checkpointed()
        converted(model)
        model.recomputes = recomputes
        aw.SandwichStep(model, sgd(model, lr=0.0), F.cross_entropy)(images, labels)
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_training_lowers_the_loss_at_every_width() -> None:
    model = converted(without_norms())
    step = aw.SandwichStep(model, sgd(model, lr=0.1), F.cross_entropy)
    images, labels = images_and_labels(32)
    for _ in range(60):
        step(images, labels)
    model.eval()
    for width in (0.25, 0.5, 0.75, 1.0):
        with aw.at_width(model, width), torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean()
        assert accuracy > 0.6, width


def test_a_network_with_several_outputs_can_be_distilled() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(PIXELS, 16)
            self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x).relu()
            return self.policy(hidden), self.value(hidden)

    model = TwoHeads()
    aw.slimmable(model, None, aw.WidthRange(0.25, 1.0, 4), example_input=torch.randn(2, PIXELS))
    step = aw.SandwichStep(
        model,
        sgd(model),
        loss=lambda output, target: F.mse_loss(output[1], target),
        distill=lambda output, teacher: F.mse_loss(output[0], teacher[0]),
    )
    result = step(torch.randn(4, PIXELS), torch.randn(4, 1))
    assert all(not part.requires_grad for output in result.outputs for part in output)
    assert float(result.losses[1]) > 0


def test_bad_choices_are_named() -> None:
    model = converted()
    optimizer = sgd(model)
    with pytest.raises(aw.AnywidthError, match="truth"):
        aw.SandwichStep(model, optimizer, F.cross_entropy, truth=1.5)
    with pytest.raises(aw.AnywidthError, match="'random'"):
        aw.SandwichStep(model, optimizer, F.cross_entropy, widths=aw.Sampling("random"))
    with pytest.raises(aw.AnywidthError, match="converted"):
        aw.SandwichStep(tiny(), optimizer, F.cross_entropy)
    with pytest.raises(aw.AnywidthError, match="2"):
        aw.SandwichStep(model, optimizer, F.cross_entropy, widths=1)
    with pytest.raises(aw.AnywidthError, match="Sampling"):
        aw.SandwichStep(model, optimizer, F.cross_entropy, widths=[0.25, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truth": "half"}, "truth"),
        ({"autocast": "bf16"}, "autocast"),
        ({"loss": None}, "loss"),
        ({"loss": nn.CrossEntropyLoss}, r"CrossEntropyLoss\(\)"),
        ({"distill": "mse"}, "distill"),
        ({"widths": aw.Sampling(seed=1), "seed": 2}, "seed"),
        ({"optimizer": 0.1}, "float"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(options: dict[str, Any], message: str) -> None:
    model = converted()
    arguments = {"optimizer": sgd(model), "loss": F.cross_entropy, **options}
    with pytest.raises(aw.AnywidthError, match=message):
        aw.SandwichStep(model, **arguments)


def test_an_optimizer_of_another_network_is_refused() -> None:
    """It would train nothing, and nothing would show it."""
    model = converted()
    with pytest.raises(aw.AnywidthError, match="SGD"):
        aw.SandwichStep(model, sgd(copy.deepcopy(model)), F.cross_entropy)
    aw.SandwichStep(model, sgd(model[9]), F.cross_entropy)  # type: ignore[index]


def test_gradients_that_the_optimizer_does_not_hold_do_not_pile_up() -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model[9], lr=0.0), F.cross_entropy)  # type: ignore[index]
    images, labels = images_and_labels(16)
    found = []
    for _ in range(2):
        step.count = 0
        step(images, labels)
        found.append(model[0].weight.grad.clone())  # type: ignore[index, union-attr, operator]
    torch.testing.assert_close(*found)


def test_a_whole_number_of_numpy_counts_widths() -> None:
    model = converted()
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy, widths=np.int64(3))  # type: ignore[arg-type]
    assert len(step(*images_and_labels(8)).widths) == 3


def test_a_frozen_norm_is_named_where_its_statistics_are_missing() -> None:
    model = converted().train()
    model[5].eval()  # type: ignore[index]
    step = aw.SandwichStep(model, sgd(model), F.cross_entropy)
    with pytest.raises(aw.AnywidthError, match="'5'"):
        step(*images_and_labels(8))
    aw.calibrate(model, [images_and_labels(16)[0]], [0.25, 1.0])
    fixed = aw.Sampling("fixed", widths=(0.25, 1.0))
    aw.SandwichStep(model, sgd(model), F.cross_entropy, widths=fixed)(*images_and_labels(8))


# ---- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"autocast": "auto"}])
def test_a_cpu_runs_in_the_parameters_dtype_and_the_loss_once_per_width(
    options: dict[str, Any],
) -> None:
    """Numbers must not depend on a stopwatch, nor a loss with a state be called to time it."""
    model = converted()
    calls = []

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        calls.append(output.dtype)
        return F.cross_entropy(output, labels)

    step = aw.SandwichStep(model, sgd(model), loss, None, **options)
    step(*images_and_labels(64))
    assert calls == [torch.float32] * 4


class Named(dict[str, Tensor]):
    """An output whose parts are attributes too, as some libraries return it."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


@dataclass(frozen=True)
class Parts:
    """An output of another kind: torch.export asks for it to be registered."""

    logits: Tensor
    name: str = "parts"


torch.utils._pytree.register_dataclass(Parts)


class WithParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = tiny()

    def forward(self, x: Tensor) -> Parts:
        return Parts(self.body(x))


def test_a_dataclass_of_outputs_can_be_distilled() -> None:
    model = converted(WithParts())
    step = aw.SandwichStep(
        model,
        sgd(model),
        loss=lambda output, labels: F.cross_entropy(output.logits, labels),
        distill=lambda output, full: aw.soft_cross_entropy(output.logits, full.logits),
    )
    result = step(*images_and_labels(8))
    assert all(isinstance(output, Parts) for output in result.outputs)
    assert not any(output.logits.requires_grad for output in result.outputs)


def test_outputs_keep_their_class() -> None:
    output = Named(logits=torch.ones(2, requires_grad=True))
    kept = detached([output])[0]
    assert isinstance(kept, Named)
    assert not kept.logits.requires_grad
    assert output.logits.requires_grad


def test_another_optimizer_needs_another_step() -> None:
    """The step would silently go on with the first one."""
    model = converted()
    first = torch.optim.SGD(model.parameters(), 0.1)
    step = aw.SandwichStep(model, first, F.cross_entropy)
    with pytest.raises(aw.AnywidthError, match="load_state_dict"):
        step.optimizer = torch.optim.SGD(model.parameters(), 0.01)
    assert step.optimizer is first
