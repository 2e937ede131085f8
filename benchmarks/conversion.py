"""Convert torchvision's models and write docs/models.md.

python benchmarks/conversion.py                  # all models, about two minutes on two cores
python benchmarks/conversion.py resnet50 swin_t  # print these two, write nothing
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from torch import nn

import anywidth as aw

MODELS = [
    "alexnet", "vgg16_bn", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2",
    "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_large", "mnasnet1_0", "efficientnet_b0",
    "efficientnet_v2_s", "shufflenet_v2_x1_0", "densenet121", "googlenet", "inception_v3",
    "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t",
    "fcn_resnet50", "deeplabv3_resnet50",
]  # fmt: skip

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

HEAD = """# Models that convert

`python benchmarks/conversion.py` writes this page (torch {torch}, torchvision {torchvision},
CPU threads: {threads}). It traces, converts and verifies each model at the narrowest, a uniform and
two nonuniform configurations, at 224 px (299 px for Inception).

- *Elastic* counts the convolution and linear layers whose whole output can narrow, of all of them.
- *Plan* and *conversion* are the seconds that `anywidth.plan` and then `anywidth.slimmable` take.
- *Fixed* lists the layers that cannot be narrowed, with the plan's reason.

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


def build(name: str) -> nn.Module:
    options: dict[str, object] = {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if name in ("fcn_resnet50", "deeplabv3_resnet50"):
        options["weights_backbone"] = None
    return torchvision.models.get_model(name, weights=None, **options)


def measure(name: str) -> Row:
    torch.manual_seed(0)
    model = build(name)
    size = 299 if name == "inception_v3" else 224
    start = time.perf_counter()
    plan = aw.plan(model, torch.randn(2, 3, size, size))
    planned = time.perf_counter()
    aw.slimmable(model, plan)
    return Row(name, aw.plan_of(model), planned - start, time.perf_counter() - planned)


def notes(rows: list[Row]) -> str:
    """The notes of the plans: sizes found by running the network, and cuts that move."""
    lines = [f"- **{row.name}**: {_short(note)}" for row in rows for note in row.plan.notes]
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
    names = parser.parse_args().models
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
        )
        table = "\n".join(f"| {' | '.join(row.cells())} |" for row in rows)
        PAGE.write_text(head + table + "\n" + notes(rows))
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
