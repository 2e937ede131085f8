"""What the narrower widths learn from."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import timm.loss
import torch
import torch.nn.functional as F
from tiny_networks import converted, images_and_labels
from torch import Tensor, nn

import anywidth as aw


def by_hand(student: list[float], teacher: list[float], temperature: float) -> float:
    soft = [math.exp(t / temperature) for t in teacher]
    labels = [value / sum(soft) for value in soft]
    exponents = [math.exp(s / temperature) for s in student]
    logs = [math.log(value / sum(exponents)) for value in exponents]
    return -sum(p * q for p, q in zip(labels, logs, strict=True)) * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_soft_cross_entropy_is_the_mean_over_a_batch(temperature: float) -> None:
    students, teachers = [[0.3, -1.2, 2.0], [1.0, 1.0, 0.0]], [[1.0, 0.5, -0.5], [-2.0, 3.0, 0.1]]
    expected = sum(
        by_hand(s, t, temperature) for s, t in zip(students, teachers, strict=True)
    ) / len(students)
    found = aw.soft_cross_entropy(torch.tensor(students), torch.tensor(teachers), temperature)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_a_certain_teacher_gives_ordinary_cross_entropy() -> None:
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 2, 2])
    certain = 1000.0 * F.one_hot(labels, 4)
    torch.testing.assert_close(
        aw.soft_cross_entropy(logits, certain), F.cross_entropy(logits, labels)
    )


def test_the_gradient_is_the_difference_of_probabilities() -> None:
    student = torch.randn(6, 4, requires_grad=True)
    teacher = torch.randn(6, 4)
    aw.soft_cross_entropy(student, teacher).backward()
    expected = (student.detach().softmax(1) - teacher.softmax(1)) / 6
    torch.testing.assert_close(student.grad, expected)


def test_temperature_keeps_the_size_of_gradients() -> None:
    """For high temperatures the gradient tends to the difference of centred logits over classes."""
    teacher = torch.randn(3, 5)
    sizes = []
    for temperature in (50.0, 200.0):
        student = torch.zeros(3, 5, requires_grad=True)
        aw.soft_cross_entropy(student, teacher, temperature).backward()
        assert student.grad is not None
        sizes.append(float(student.grad.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_the_full_width_gets_no_gradient_from_the_narrower_ones() -> None:
    model = converted()
    images, labels = images_and_labels(8)
    seen: list[Tensor] = []

    def distill(output: Tensor, teacher: Tensor) -> Tensor:
        seen.append(teacher)
        return aw.soft_cross_entropy(output, teacher)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    result = aw.SandwichStep(model, optimizer, F.cross_entropy, distill)(images, labels)
    assert len(seen) == 3
    assert all(not teacher.requires_grad for teacher in seen)
    assert all(torch.equal(teacher, result.outputs[0]) for teacher in seen)


def test_channels_beyond_the_widest_student_see_the_true_labels_alone() -> None:
    model = converted()
    images, labels = images_and_labels(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sampling = aw.Sampling("fixed", widths=(1.0, 0.5))
    aw.SandwichStep(model, optimizer, F.cross_entropy, widths=sampling)(images, labels)
    weight = model[4].weight  # type: ignore[index]
    both = weight.grad.clone()
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    torch.testing.assert_close(both[8:], weight.grad[8:])
    assert not torch.allclose(both[:8, :8], weight.grad[:8, :8])


def test_classes_of_a_picture_are_its_channels() -> None:
    student, teacher = torch.randn(2, 5, 4, 3), torch.randn(2, 5, 4, 3)
    rows = [logits.permute(0, 2, 3, 1).reshape(-1, 5) for logits in (student, teacher)]
    expected = aw.soft_cross_entropy(*rows)
    torch.testing.assert_close(aw.soft_cross_entropy(student, teacher), expected)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(aw.AnywidthError, match=r"\(4, 5\)"):
        aw.soft_cross_entropy(torch.randn(4, 10), torch.randn(4, 5))
    with pytest.raises(aw.AnywidthError, match=r"\(1, 10\)"):
        aw.soft_cross_entropy(torch.randn(10), torch.randn(1, 10))
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(aw.AnywidthError, match="temperature"):
            aw.soft_cross_entropy(torch.randn(4, 5), torch.randn(4, 5), temperature)


@pytest.mark.parametrize("flat", [False, True])
def test_classes_on_the_last_axis_are_refused(flat: bool) -> None:
    """A language model would be distilled over its positions, and nothing would show it."""
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 11))
    tokens = torch.randint(11, (4, 7))
    aw.slimmable(model, example_input=tokens)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    def distill(output: Tensor, full: Tensor) -> Tensor:
        return aw.soft_cross_entropy(output.flatten(0, -2), full.flatten(0, -2))

    targets = tokens.flatten() if flat else tokens
    with pytest.raises(aw.AnywidthError, match=r"\(4, 7, 11\)"):
        aw.SandwichStep(model, optimizer, loss, aw.soft_cross_entropy)(tokens, targets)
    hot = functools.partial(aw.soft_cross_entropy, temperature=2.0)
    with pytest.raises(aw.AnywidthError, match="11"):
        aw.SandwichStep(model, optimizer, loss, hot)(tokens, targets)
    aw.SandwichStep(model, optimizer, loss, distill)(tokens, targets)


@pytest.mark.parametrize(
    ("distill", "better"),
    [
        (F.cross_entropy, r"anywidth\.soft_cross_entropy"),
        (nn.CrossEntropyLoss(), r"anywidth\.soft_cross_entropy"),
        (functools.partial(F.kl_div, reduction="batchmean"), r"anywidth\.soft_cross_entropy"),
        (F.binary_cross_entropy_with_logits, r"full\.sigmoid\(\)"),
        (nn.BCEWithLogitsLoss(), r"full\.sigmoid\(\)"),
    ],
)
def test_a_loss_of_probabilities_is_no_distillation(distill: Any, better: str) -> None:
    """It would take the full width's logits for probabilities."""
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(aw.AnywidthError, match=better):
        aw.SandwichStep(model, optimizer, F.cross_entropy, distill)
    for fits in (F.mse_loss, nn.KLDivLoss(log_target=True), aw.soft_cross_entropy, None):
        aw.SandwichStep(model, optimizer, F.cross_entropy, fits)


class HalfAsMuch(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) / 2


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (F.mse_loss, "mse_loss"),
        (nn.BCEWithLogitsLoss(), "BCEWithLogitsLoss"),
        (timm.loss.BinaryCrossEntropy(), "BinaryCrossEntropy"),
        (lambda output, target: F.binary_cross_entropy_with_logits(output, target), "lambda"),
        (lambda output, target: F.cross_entropy(output, target), "lambda"),
        (functools.partial(F.mse_loss, reduction="sum"), "mse_loss"),
        (functools.partial(F.cross_entropy, reduction="sum"), "cross_entropy"),
        (HalfAsMuch(), "HalfAsMuch"),
    ],
)
def test_a_loss_not_known_to_be_cross_entropy_needs_a_distillation(loss: Any, name: str) -> None:
    """Narrow widths would learn softmax, and nothing would show it."""
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(aw.AnywidthError, match=f"{name}.*distill="):
        aw.SandwichStep(model, optimizer, loss)
    for given in (F.mse_loss, aw.soft_cross_entropy, None):
        aw.SandwichStep(model, optimizer, loss, given)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        functools.partial(nn.CrossEntropyLoss()),
        timm.loss.LabelSmoothingCrossEntropy(),
        timm.loss.SoftTargetCrossEntropy(),
        lambda output, target: F.cross_entropy(output, target),
    ],
)
def test_cross_entropy_is_distilled_by_the_full_widths_soft_labels(loss: Any) -> None:
    images, labels = images_and_labels(8)
    targets = F.one_hot(labels, 10).float() if "SoftTarget" in str(loss) else labels
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    known = {} if "lambda" not in str(loss) else {"distill": aw.soft_cross_entropy}
    result = aw.SandwichStep(model, optimizer, loss, **known)(images, targets)
    full, *others = result.outputs
    for output, value in zip(others, result.losses[1:], strict=True):
        assert torch.equal(value, aw.soft_cross_entropy(output, full))


@pytest.mark.parametrize("index", [-100, 255])
@pytest.mark.parametrize("distill", ["auto", functools.partial(aw.soft_cross_entropy)])
def test_what_the_loss_ignores_is_not_distilled(index: int, distill: Any) -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 1), nn.ReLU(), nn.Conv2d(16, 5, 1))
    pictures = torch.randn(2, 1, 5, 5)
    aw.slimmable(model, example_input=pictures)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    targets = torch.randint(5, (2, 5, 5))
    targets[:, 2:] = index
    for loss in (
        functools.partial(F.cross_entropy, ignore_index=index),
        nn.CrossEntropyLoss(ignore_index=index),
    ):
        result = aw.SandwichStep(model, optimizer, loss, distill)(pictures, targets)
        gradient = model[0].weight.grad.clone()  # type: ignore[union-attr, operator]
        step = aw.SandwichStep(model, optimizer, loss, distill)
        kept = step(pictures[:, :, :2], targets[:, :2])
        torch.testing.assert_close(result.losses, kept.losses)
        torch.testing.assert_close(gradient, model[0].weight.grad)


def test_a_picture_of_logits_is_distilled() -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 1), nn.ReLU(), nn.Conv2d(16, 5, 1))
    pictures = torch.randn(2, 1, 5, 5)
    aw.slimmable(model, example_input=pictures)
    step = aw.SandwichStep(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy)
    for height, width in ((5, 5), (4, 5), (5, 4), (6, 7)):
        pictures = torch.randn(2, 1, height, width)
        with torch.no_grad():
            shares = model(pictures).softmax(1)
            with aw.at_width(model, 0.25):
                expected = -(shares * model(pictures).log_softmax(1)).sum(1).mean()
        result = step(pictures, torch.randint(5, (2, height, width)))
        assert result.losses[1].item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_is_no_classifier_is_told_what_to_pass() -> None:
    one = torch.randn(4, 1)
    with pytest.raises(aw.AnywidthError, match=r"\(4, 1\)"):
        aw.soft_cross_entropy(one, one)
    with pytest.raises(aw.AnywidthError, match="dict"):
        aw.soft_cross_entropy({"logits": one}, {"logits": one})  # type: ignore[arg-type]
