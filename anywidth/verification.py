"""After a conversion: does the network run at other widths, and equal its extracted twins?"""

from __future__ import annotations

from typing import Any

from torch import nn

from anywidth.errors import AnywidthError
from anywidth.mending import mend
from anywidth.state import state_of
from anywidth.trial import example_inputs, make_trial


def verify(model: nn.Module, *, strict: bool, example_input: Any = None) -> None:
    """Compares sliced and extracted at several configurations; mends or pins what fails."""
    state = state_of(model)
    plan = state.plan
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        trial = make_trial(model, plan, example_inputs(model, plan, example_input))
        is_seen, attributes = plan.rehearsed, list(plan.attributes)
        while True:
            failure = trial.first_failure()
            if failure is None:
                # Attributes that follow now did not when the plan was made.
                is_seen = is_seen and plan.attributes == attributes
                wrong = {} if is_seen else trial.misread_groups()
                if not wrong:
                    break
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
                        f"plan.pin({group!r}), or convert with strict=False to have that done"
                    )
                plan.pin(group, f"failed verification: {message}")
                plan.notes.append(f"{group} was pinned: {message}")
            state.forget()
    finally:
        state.forget()
        state.set(model, plan.full)
        state.width = 1.0 if plan.widths.high == 1.0 else plan.full
        for module, mode in modes.items():
            module.training = mode
