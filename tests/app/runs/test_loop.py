"""The training loop: what it logs, and what survives a kill, an interrupt or a damaged file."""

from __future__ import annotations

import csv
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from command_line import HANGS_AFTER, TINY_RUN, command, start, succeed, wait_for_step
from tiny_networks import converted, images_and_labels
from torch import Tensor

import anywidth as aw
import anywidth.app.runs.loop as anywidth_training
from anywidth.app.runs.loop import Training, load_weights, train
from anywidth.app.runs.run import Run
from anywidth.app.tasks.classification.task import ClassificationSettings
from anywidth.training.step import StepResult

SLOW_RUN = (
    *TINY_RUN, "--model", "tiny_networks:slow", "--checkpoint-every", "3", "--log-every", "1",
    "--no-report",
)  # fmt: skip
STEPS = 30
# Long enough that a kill falls where it was aimed, on a busy machine too: 4 widths a step.
PAUSE = "0.02"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    succeed("train", *SLOW_RUN, "--out", run)
    return run


def assert_same_result(run: Path, expected: Path) -> None:
    for name in ("model.safetensors", "statistics.safetensors", "metrics.csv"):
        assert (run / name).read_bytes() == (expected / name).read_bytes(), name


def last_logged(run: Path) -> int:
    return int((run / "metrics.csv").read_text().splitlines()[-1].partition(",")[0])


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


# ---- real processes ------------------------------------------------------------------------------


def test_a_killed_run_resumes_to_the_same_bits(uninterrupted: Path, tmp_path: Path) -> None:
    run, chance = tmp_path / "run", random.Random(8)
    arguments: tuple[object, ...] = (*SLOW_RUN, "--out", run)
    for first, last in ((2, 12), (14, 27)):
        process = start("train", *arguments, PAUSE=PAUSE)
        wait_for_step(process, run / "metrics.csv", chance.randint(first, last))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (run / "finished.json").exists()
        arguments = ("--resume", run, "--trust", "--no-report")
    succeed("train", *arguments)
    assert last_logged(run) == STEPS
    assert_same_result(run, uninterrupted)


def test_ctrl_c_leaves_a_run_that_resumes_even_from_an_older_checkpoint(
    uninterrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    process = start("train", *SLOW_RUN, "--out", run, PAUSE=PAUSE)
    wait_for_step(process, run / "metrics.csv", 8)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert f"anywidth train --resume {run}" in output.replace("\n", "")
    assert newest_checkpoint(run).name == f"step-{last_logged(run):09d}"

    damaged = newest_checkpoint(run) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-50])
    succeed("train", "--resume", run, "--trust", "--no-report")
    assert str(damaged) in caplog.text
    assert_same_result(run, uninterrupted)


# ---- in this process -----------------------------------------------------------------------------


class Batches:
    """An epoch of four batches, the same however often it is begun again."""

    batch_size = 8

    def __len__(self) -> int:
        return 4

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(start, 4):
            yield images_and_labels(8, seed=100 * epoch + number)


def measure(result: StepResult, targets: Tensor) -> dict[str, Tensor]:
    return {"loss_max": result.losses[0]}


def training(folder: Path, epochs: int = 3, **options: object) -> Training:
    torch.manual_seed(0)
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    step = aw.SandwichStep(model, optimizer, F.cross_entropy)
    is_new = not (folder / "config.json").exists()
    run = Run.create(folder, ClassificationSettings()) if is_new else Run.open(folder, writing=True)
    return Training(
        run,
        step,
        Batches(),
        epochs,
        lambda number: 0.1 / (1 + number),
        measure,
        lambda: {"validation_error_max": 50.0},
        **options,  # type: ignore[arg-type]
    )


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_are_logged_every_so_many_steps(tmp_path: Path) -> None:
    work = training(tmp_path / "run", log_every=5, validate_every=2)
    assert train(work)
    rows = rows_of(tmp_path / "run")
    assert [int(row["step"]) for row in rows] == [5, 8, 10, 12]
    assert [bool(row["validation_error_max"]) for row in rows] == [False, True, False, True]
    assert [bool(row["loss_max"]) for row in rows] == [True, False, True, True]
    assert float(rows[0]["learning_rate"]) == pytest.approx(0.1 / 5)
    assert [row["epoch"] for row in rows] == ["2", "2", "3", "3"]


def test_the_learning_rate_of_each_step_is_set(tmp_path: Path) -> None:
    work = training(tmp_path / "run", epochs=1)
    rates = []
    work.step.after_backward = lambda: rates.append(work.step.optimizer.param_groups[0]["lr"])
    train(work)
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])


def test_a_raise_in_the_middle_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole", checkpoint_every=2)
    train(whole)
    broken = training(tmp_path / "broken", checkpoint_every=2)

    def fail() -> None:
        if broken.step.count == 6:
            raise RuntimeError("the power is gone")

    broken.step.after_backward = fail
    with pytest.raises(RuntimeError, match="power"):
        train(broken)
    resumed = training(tmp_path / "broken", checkpoint_every=2)
    assert train(resumed)
    assert resumed.step.count == 12
    expected = whole.step.model.state_dict()
    for name, tensor in resumed.step.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_an_interrupt_stops_after_the_present_step(tmp_path: Path) -> None:
    work = training(tmp_path / "run")
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        if work.step.count == 2:
            signal.raise_signal(signal.SIGINT)

    work.step.after_backward = interrupt
    assert not train(work)
    assert work.step.count == 3
    assert newest_checkpoint(tmp_path / "run").name == "step-000000003"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    work = training(tmp_path / "run")

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    work.step.after_backward = interrupt_twice
    with pytest.raises(KeyboardInterrupt):
        train(work)
    assert work.step.count == 0


def test_a_loss_that_is_not_finite_ends_training_and_no_checkpoint_holds_it(tmp_path: Path) -> None:
    work = training(tmp_path / "run", log_every=4, checkpoint_every=1)
    work.learning_rate = lambda number: 0.1 if number < 2 else 1e30
    with pytest.raises(aw.AnywidthError) as error:
        train(work)
    said = str(error.value)
    assert "step 4 " in said
    assert "1e+30" in said
    assert "--learning-rate" in said
    kept = newest_checkpoint(tmp_path / "run")
    assert f"step {int(kept.name[-9:])}" in said
    weights = Run.open(tmp_path / "run").load_checkpoint()
    assert weights is not None
    assert all(tensor.isfinite().all() for tensor in weights.tensors["model"].values())
    # The last good one: after the step that made the weights too large they were finite still.
    assert (kept.parent / "step-000000002").is_dir()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    work = training(tmp_path / "run", log_every=100, checkpoint_every=2)
    weight = next(work.step.model.parameters())

    def spoil() -> None:
        if work.step.count == 3 and weight.grad is not None:
            weight.grad.fill_(torch.nan)

    work.step.after_backward = spoil
    with pytest.raises(aw.AnywidthError, match="finite"):
        train(work)
    assert newest_checkpoint(tmp_path / "run").name == "step-000000002"


def test_the_loss_is_read_with_the_metrics_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = training(tmp_path / "run", log_every=6)
    read: list[int] = []
    summed = anywidth_training.sum_over_ranks
    monkeypatch.setattr(
        anywidth_training, "sum_over_ranks", lambda t: read.append(work.step.count) or summed(t)
    )
    assert train(work)
    assert read == [6, 12]


# ---- an interrupt outside of the steps -----------------------------------------------------------


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "place",
    ["anywidth.app.tasks.classification.task.load_data", "anywidth.app.commands.train.finish"],
)
def test_an_interrupt_says_how_to_go_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "my [bold] runs of a name that is rather long for a line of eighty columns"
    with monkeypatch.context() as patch:
        patch.setattr(place, interrupt)
        answer = command("train", *TINY_RUN, "--epochs", "1", "--out", run)
    assert answer.code == 130
    assert "Traceback" not in answer.errors
    assert answer.output.splitlines()[-1].endswith(f"anywidth train --resume '{run}' --trust")
    assert command("train", "--resume", run, "--trust", "--no-report").code == 0


def test_an_interrupt_without_a_run_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anywidth.distributed.start_processes", interrupt)
    answer = command("train", *TINY_RUN, "--out", tmp_path / "run")
    assert (answer.code, answer.output) == (130, "")
    assert not (tmp_path / "run").exists()


def test_a_failure_before_the_first_step_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("anywidth.app.tasks.classification.task.load_data", fail)
    with pytest.raises(RuntimeError, match="mistake"):
        command("train", *TINY_RUN, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["log_every", "validate_every", "checkpoint_every"])
@pytest.mark.parametrize("number", [0, -1])
def test_nothing_happens_every_0_steps(name: str, number: int, tmp_path: Path) -> None:
    work = training(tmp_path / "run", **{name: number})
    with pytest.raises(aw.AnywidthError, match=name):
        train(work)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


def test_a_finished_run_trains_no_further(tmp_path: Path) -> None:
    train(training(tmp_path / "run"))
    again = training(tmp_path / "run")
    again.step.after_backward = lambda: pytest.fail("a step was taken")
    assert train(again)
    assert again.step.count == 12


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    tensors = {"0.weight": torch.zeros(3), "other": torch.zeros(1)}
    with pytest.raises(aw.AnywidthError) as error:
        load_weights(converted(), tensors, tmp_path / "run")
    for name in ("Sequential", "1.running_var", "other", "0.weight"):
        assert name in str(error.value)


def test_the_configuration_is_on_disk_with_its_version(uninterrupted: Path) -> None:
    data = json.loads((uninterrupted / "config.json").read_text())
    assert data["task"] == "classification"
    assert data["version"] == ClassificationSettings.version
    assert data["model"] == "tiny_networks:slow"
    assert any((uninterrupted / "tensorboard").iterdir())
