"""Verify a conversion: the network must run at other widths and equal extracted networks."""

from __future__ import annotations

from typing import Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.planning.example_inputs import example_inputs
from anywidth.planning.groups import Plan
from anywidth.planning.modes import evaluating
from anywidth.slimming.state import state_of
from anywidth.slimming.verifying.mending import mend
from anywidth.slimming.verifying.trial import make_trial


def verify(model: nn.Module, *, strict: bool, example_input: Any = None) -> None:
    """Compare sliced and extracted at several configurations; mend or pin groups that fail."""
    state = state_of(model)
    plan = state.plan
    try:
        with evaluating(model):
            _mend_or_pin(model, plan, strict, example_inputs(model, plan, example_input))
    finally:
        state.forget()
        state.set_full(model)


def _mend_or_pin(model: nn.Module, plan: Plan, strict: bool, inputs: tuple[Any, ...]) -> None:
    trial = make_trial(model, plan, inputs)
    is_seen, attributes = plan.rehearsed, list(plan.attributes)
    while True:
        failure = trial.first_failure()
        if failure is None:
            # Newly found attributes did not follow when the plan was made.
            is_seen = is_seen and plan.attributes == attributes
            wrong = {} if is_seen else trial.misread_groups()
            if not wrong:
                return
            is_seen, attributes = True, list(plan.attributes)
        else:
            group = trial.culprit(failure)
            if mend(trial, group, failure):
                continue
            wrong = {group: failure.message}
        for group, message in wrong.items():
            if strict:
                raise AnywidthError(
                    f"group {group!r} cannot be narrowed: {message}. Pin it with "
                    f"plan.pin({group!r}), or convert with strict=False, which pins it"
                )
            plan.pin(group, f"failed verification: {message}")
            plan.notes.append(f"{group} was pinned: {message}")
        state_of(model).forget()
