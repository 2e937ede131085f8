"""Convert torchvision's models and small networks of other families, and write docs/models.md.

python3 -m benchmarks.conversion                  # all models, about four minutes on two cores
python3 -m benchmarks.conversion resnet50 swin_t  # print these two, write nothing
python3 -m benchmarks.conversion --families       # print the table of families, write nothing
python3 -m benchmarks.conversion --families BERT  # print the row of one network
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import anywidth as aw
from anywidth.app.model_spec import load_model
from benchmarks.network_families import FAMILIES

MODELS = [
    "alexnet", "vgg16_bn", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2",
    "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_large", "mnasnet1_0", "efficientnet_b0",
    "efficientnet_v2_s", "shufflenet_v2_x1_0", "densenet121", "googlenet", "inception_v3",
    "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t",
    "fcn_resnet50", "deeplabv3_resnet50",
]  # fmt: skip

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

HEAD = """# Models that convert

`python3 -m benchmarks.conversion` writes this page (torch {torch}, torchvision {torchvision},
CPU threads: {threads}). It traces, converts and verifies each model at the narrowest, a uniform and
two nonuniform configurations, at 224 px (299 px for Inception).

- *Elastic* counts the convolution and linear layers whose whole output can narrow, of all of them.
- *Plan* and *conversion* are the CPU seconds of `anywidth.plan` and then `anywidth.slimmable`.
- *Fixed* lists the layers that cannot be narrowed, with the plan's reason.
- *At 0.25* is the share of the multiply-adds that is left at width 0.25, rounded to 4 channels or
  whole heads; 6.25 % is what layers with elastic inputs and outputs come to.

## By family

Small networks with random weights (`benchmarks/network_families.py`). The outputs of a network,
such as logits, never narrow; in networks this small they weigh more than in real ones. Detectors of
torchvision, which cannot be exported as a whole, are planned by their parts (`parts="auto"`). Their
*plan* includes the search for parts, and their multiply-adds are those of the whole network.

{families}

Heads that differ by constants stay, and the features of each narrow: with ALiBi (Bloom, MPT)
the slopes depend on the number of heads. CodeGen cuts its heads into four parts, which narrow by
whole heads. In GPTBigCode all heads stay if each has as many channels as there are heads. In Falcon
and GPTBigCode the keys and values that all heads share stay. Mamba-2 with groups keeps its states.
A printed plan says what stays whole, why, and what it costs at the narrowest width.

## torchvision

| model | elastic | groups | plan | conversion | M multiply-adds, 1.0 · 0.5 · 0.25 | fixed |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    name: str
    plan: aw.Plan
    plan_seconds: float
    conversion_seconds: float

    def cells(self) -> list[str]:
        elastic, layers = self.plan.elastic_layers()
        macs = [aw.macs(self.plan, width) / 1e6 for width in (1.0, 0.5, 0.25)]
        return [
            self.name,
            f"{elastic} of {layers}",
            str(len(self.plan.groups)),
            f"{self.plan_seconds:.1f}",
            f"{self.conversion_seconds:.1f}",
            " · ".join(f"{count:,.0f}" for count in macs),
            self.fixed(),
        ]

    def fixed(self) -> str:
        """Layers that keep their output whole, by reason."""
        reasons: dict[str, list[str]] = {}
        for group in self.plan.groups.values():
            if group.fixed is not None and group.makers:
                reasons.setdefault(group.fixed, []).extend(f"`{m}`" for m in group.makers)
        return "; ".join(f"{', '.join(layers)}: {reason}" for reason, layers in reasons.items())


FAMILY_HEAD = """\
| family | network | elastic | multiply-adds narrow | at 0.25 | plan | conversion |
|---|---|---|---|---|---|---|
"""


def family_table(names: Sequence[str] = ()) -> str:
    """A row per network, or per named one; those whose package is missing are named below."""
    lines, missing = [], []
    for family, networks in FAMILIES.items():
        for name, made in networks.items():
            if names and name not in names:
                continue
            try:
                model, example = made()
                lines.append(f"| {family} | {name} | {_family_cells(model, example)} |")
                print(lines[-1], flush=True)
            except ModuleNotFoundError as error:
                missing.append(f"{name} ({error.name} is not installed)")
    left_out = f"\n\nLeft out: {', '.join(missing)}." if missing else ""
    return FAMILY_HEAD + "\n".join(lines) + left_out


def _family_cells(model: nn.Module, example: Any) -> str:
    torch.manual_seed(0)
    named = example if isinstance(example, dict) else {"example_input": example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, *seconds = converted(model.eval(), aw.WidthRange(0.25, 1.0, 4), parts="auto", **named)
    elastic, layers = plan.elastic_layers()
    left = aw.macs(plan, 0.25) / aw.macs(plan, 1.0)
    shares = f"{plan.elastic_share():.0%} | {left:.1%}"
    return f"{elastic} of {layers} | {shares} | {seconds[0]:.1f} | {seconds[1]:.1f}"


def measure(name: str) -> Row:
    torch.manual_seed(0)
    model = load_model(f"torchvision:{name}")
    size = 299 if name == "inception_v3" else 224
    return Row(name, *converted(model, None, example_input=torch.randn(2, 3, size, size)))


def converted(
    model: nn.Module, widths: aw.WidthRange | None, **planning: Any
) -> tuple[aw.Plan, float, float]:
    """The plan of a model that was converted, and the CPU seconds of planning and conversion."""
    start = time.process_time()
    plan = aw.plan(model, **planning)
    planned = time.process_time()
    aw.slimmable(model, plan, widths)
    return aw.plan_of(model), planned - start, time.process_time() - planned


def notes(rows: list[Row]) -> str:
    """The notes of the plans: sizes found by running the network, and cuts that move.

    Of blocks that are built alike, the first one is shown.
    """
    lines = []
    for row in rows:
        alike: dict[str, list[str]] = {}
        for note in row.plan.notes:
            alike.setdefault(re.sub(r"\d+", "N", note), []).append(_short(note))
        for first, *others in alike.values():
            also = f" (and {len(others)} more like it)" if others else ""
            lines.append(f"- **{row.name}**: {first}{also}")
    if not lines:
        return ""
    head = (
        "\n## Notes in the plans\n\nThe exported graph does not show sizes that Python computes; "
        "conversion finds them by running the network.\nIf a cut falls inside channels that narrow "
        "as one, its later parts hold other channels at other widths.\n\n"
    )
    return head + "\n".join(lines) + "\n"


def _short(note: str, most: int = 3) -> str:
    names, verb, rest = note.partition(" shrink with ")
    if not verb:
        names, verb, rest = note.partition(": later parts")
    listed = names.split(", ")
    if not verb or len(listed) <= most:
        return note
    return f"{', '.join(listed[:most])} and {len(listed) - most} more{verb}{rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="models to print; all if not given"
    )
    parser.add_argument("--families", action="store_true", help="print the families alone")
    options = parser.parse_args()
    names = options.models
    if options.families:
        known = {name for networks in FAMILIES.values() for name in networks}
        if unknown := sorted({*names} - known):
            parser.error(f"no network {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        family_table(names)
        return
    if unknown := sorted({*names} - {*torchvision.models.list_models()}):
        parser.error(f"torchvision has no {', '.join(unknown)}")
    measure("squeezenet1_1")  # the first export of a process takes longer
    rows = []
    for name in names or MODELS:
        rows.append(measure(name))
        print(" | ".join(rows[-1].cells()), flush=True)
    reached = Counter(row.plan_seconds + row.conversion_seconds < 10 for row in rows)
    print(f"under 10 s together: {reached[True]} of {len(rows)}")
    if not names:
        head = HEAD.format(
            torch=torch.__version__.split("+")[0],
            torchvision=torchvision.__version__.split("+")[0],
            threads=torch.get_num_threads(),
            families=family_table(),
        )
        table = "\n".join(f"| {' | '.join(row.cells())} |" for row in rows)
        PAGE.write_text(head + table + "\n" + notes(rows))
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
