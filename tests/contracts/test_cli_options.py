"""Commands and options that scripts may rely on: removing or renaming one breaks a user."""

from __future__ import annotations

import dataclasses

import pytest
import typer
from typer.main import get_command

from anywidth.app.commands.app import app
from anywidth.app.tasks.classification.task import ClassificationSettings

WIDTHS = ("--width", "--budget", "--max-macs", "--max-parameters", "--channels")

OPTIONS = {
    "train": {"--out", "--epochs", "--seed", "--batch-size", "--device", "--resume", "--report",
              "--no-report", "--show", "--list", "--data-dir", "--eval-dir", "--config",
              "--dry-run", "--wandb", "--trust"},
    "calibrate": {"--widths", "--samples", "--method", "--device", "--data-dir"},
    "spectrum": {"--widths", "--channels", "--latency", "--no-latency", "--device", "--data-dir",
                 "--eval-dir"},
    "search": {"--macs", "--latency", "--parameters", "--method", "--seed", "--out", "--resume",
               "--latencies", "--other-device", "--probes", "--device", "--data-dir"},
    "tune": {"--widths", "--epochs", "--learning-rate", "--device", "--data-dir"},
    "compare": {"--out", "--metric"},
    "report": {"--baseline", "--device", "--data-dir", "--eval-dir"},
    "predict": {*WIDTHS, "--top", "--json", "--device"},
    "export": {*WIDTHS, "--widths", "--out", "--force"},
    "serve": {"--host", "--port", "--name", "--deadline-ms", "--late", "--least-width",
              "--least-accuracy", "--hysteresis", "--threads", "--workers", "--most-waiting",
              "--most-body", "--token-file", "--page", "--no-page", "--ray", "--replicas",
              "--most-replicas", "--target-width"},
    "inspect": {"--input", "--widths", "--json"},
    "upscale": {*WIDTHS, "--out", "--device"},
    "play": {*WIDTHS, "--out", "--video", "--seed", "--greedy", "--sampled", "--device"},
    "study": {"--data", "--data-dir", "--seeds", "--epochs", "--out", "--minutes", "--parallel",
              "--only", "--only-training", "--device", "--set", "--list"},
}  # fmt: skip

ARGUMENTS = {
    "train": ["arguments"],
    "calibrate": ["run"],
    "tune": ["run"],
    "spectrum": ["run"],
    "search": ["run"],
    "compare": ["runs"],
    "report": ["run"],
    "predict": ["run", "image"],
    "export": ["run"],
    "serve": ["bundle"],
    "upscale": ["run", "image"],
    "play": ["run"],
    "study": ["names"],
}

FIELDS = {
    "model", "total_stride", "strides", "data", "data_dir", "image_size", "limit", "validation",
    "workers", "label_smoothing", "head_rate",
    "skip_corrupt", "method", "low", "high", "divisor", "width", "switches", "private_affine",
    "widths_per_step", "rule", "nonuniform", "lattice", "distill", "temperature", "truth",
    "average_outputs", "epochs", "batch_size", "learning_rate", "warmup_epochs", "momentum",
    "weight_decay", "flip", "crop_padding", "cutout", "calibration_samples", "calibration_method",
    "calibration_augmented",
    "evaluation_batch_size", "precision", "device", "seed", "validate_every", "log_every",
    "checkpoint_every", "held_out", "own_channels", "from_run",
    "weights", "ema_decay", "teacher", "from_checkpoint", "sort_channels",
    "zero_gamma", "schedule", "gradient_clip", "multiplier",
}  # fmt: skip


def parameters(name: str) -> list[typer.core.TyperOption | typer.core.TyperArgument]:
    return get_command(app).commands[name].params  # type: ignore[attr-defined]


def test_no_command_is_missing() -> None:
    assert set(OPTIONS) <= set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_missing(name: str) -> None:
    found = {
        option
        for parameter in parameters(name)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert OPTIONS[name] <= found


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_keep_their_order(name: str) -> None:
    found = [p.name for p in parameters(name) if p.param_type_name == "argument"]
    assert found == ARGUMENTS[name]


def test_no_field_of_a_classification_run_is_missing() -> None:
    fields = {field.name: field for field in dataclasses.fields(ClassificationSettings)}
    assert set(fields) >= FIELDS
    assert all(field.metadata.get("help") for field in fields.values())
    assert ClassificationSettings.task == "classification"
