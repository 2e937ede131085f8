"""What `anywidth tune` refuses, in the words of its options."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anywidth.app.own_command import own_command
from anywidth.app.tasks.trained import Trained
from anywidth.errors import AnywidthError
from anywidth.slimming.convert import plan_of


def check_tuning(
    trained: Trained, widths: Sequence[float], epochs: int, learning_rate: float
) -> None:
    if epochs < 1:
        raise AnywidthError(f"--epochs {epochs}: expected at least 1")
    if not 0 < learning_rate < math.inf:
        raise AnywidthError(f"--learning-rate {learning_rate}: expected a number above 0")
    plan = plan_of(trained.model)
    full = [width for width in widths if plan.resolve(trained.own_width(width)) == plan.full]
    if full:
        raise AnywidthError(
            f"--widths {full[0]}: the scales and biases of the full width are the network's own, "
            "which other widths use too; leave it out"
        )
    if missing := trained.uncalibrated(widths):
        named, folder = ",".join(map(str, missing)), trained.run.folder
        again = own_command("calibrate", folder, "--widths", named, *trained.settings.allowance)
        raise AnywidthError(f"no statistics for width {named} yet; compute them with: {again}")
