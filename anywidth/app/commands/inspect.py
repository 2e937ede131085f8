"""`anywidth inspect`: the plan of a network, and the cost of its widths."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anywidth.app.showing import output
from anywidth.measuring.heartbeat import nothing, speaking, working
from anywidth.measuring.width_lists import parse_widths
from anywidth.width import WidthRange

if TYPE_CHECKING:
    from anywidth.planning.groups import Plan


def inspect(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK",
            help="mobilenet_v1, torchvision:NAME, timm:NAME, package.module:function or "
            "path/to/file.py:function",
            show_default=False,
        ),
    ],
    example: Annotated[
        str, typer.Option("--input", help="The shape of one example, without the batch.")
    ] = "3x224x224",
    widths: Annotated[
        str | None,
        typer.Option(
            help="Widths to show the cost of: 0.25,0.5,1.0 or 0.25:1.0:0.025.",
            show_default="four from low to high",
        ),
    ] = None,
    low: Annotated[float, typer.Option(help="The narrowest width.")] = 0.25,
    high: Annotated[float, typer.Option(help="The widest width.")] = 1.0,
    divisor: Annotated[int, typer.Option(help="Channels are rounded to multiples of this.")] = 8,
    verify: Annotated[
        bool,
        typer.Option(help="Convert the network and check it at some widths."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON, for programs.")] = False,
) -> None:
    """Show which layers of a network can narrow, which cannot and why, and what widths cost.

    Channels that must shrink together are one group, and each row is a group.
    Nothing is trained: use it to see whether your own network suits anywidth.

    Examples:

      anywidth inspect torchvision:resnet50

      anywidth inspect my_package.networks:build --input 1x28x28 --json

      anywidth inspect path/to/networks.py:build
    """
    from anywidth.app.model_spec import parse_input
    from anywidth.measuring.cost import macs, parameter_count

    shape = parse_input(example)
    width_range = WidthRange(low, high, divisor)
    chosen = _spread(low, high) if widths is None else parse_widths(widths)
    for width in chosen:
        width_range.fraction(width)
    plan = _plan(spec, shape, width_range, verify)
    costs = [
        {"width": width, "macs": macs(plan, width), "parameters": parameter_count(plan, width)}
        for width in chosen
    ]
    if as_json:
        typer.echo(json.dumps(_to_json(spec, shape, plan, verify, costs), indent=2))
    else:
        _print(spec, plan, costs)


def _plan(spec: str, shape: tuple[int, ...], widths: WidthRange, verify: bool) -> Plan:
    """The plan; if it is verified, with the changes that verification made."""
    import torch

    from anywidth.app.model_spec import load_model
    from anywidth.planning.trace import plan as make_plan
    from anywidth.slimming.convert import plan_of, slimmable

    with _saying(f"building {spec}"):
        model = load_model(spec)
    with _saying(f"tracing {spec}"):
        plan = make_plan(model, torch.randn(2, *shape))
    plan.widths = widths
    if verify:
        with _saying(f"verifying {spec}"):
            slimmable(model, plan, widths)
        plan = plan_of(model)
    return plan


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """Show progress on standard error, so that standard output only has the answer."""
    if sys.stderr.isatty():
        with Console(stderr=True).status(escape(what)), speaking(nothing()):
            yield
    else:
        output.note(what)
        with working(what):
            yield


def _spread(low: float, high: float) -> list[float]:
    return list(dict.fromkeys(round(low + i * (high - low) / 3, 6) for i in range(4)))


def _to_json(
    spec: str,
    shape: tuple[int, ...],
    plan: Plan,
    verified: bool,
    costs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    elastic, layers = plan.elastic_layers()
    return {
        "model": spec,
        "input": list(shape),
        "verified": verified,
        "elastic_layers": elastic,
        "layers": layers,
        "costs": costs,
        "plan": plan.to_json(),
    }


def _print(spec: str, plan: Plan, costs: Sequence[Mapping[str, Any]]) -> None:
    from anywidth.app.showing.spectrum_tables import format_count, format_width
    from anywidth.planning.plan_text import held_lines

    elastic, layers = plan.elastic_layers()
    output.console.print(_group_table(plan))
    for note in [*plan.notes, *held_lines(plan.held_back(), plan.widths.low)]:
        output.console.print(f"note: {note}", markup=False, highlight=False)
    output.console.print(
        f"{spec}: {elastic} of {layers} convolution and linear layers have an elastic output",
        markup=False,
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("width", "multiply-adds", "", "parameters", ""):
        table.add_column(heading, justify="right")
    for one in costs:
        counts = (one["macs"], one["parameters"])
        cells = (text for n in counts for text in (f"{n:,}", format_count(n)))
        table.add_row(format_width(one["width"]), *cells)
    output.console.print(table)


def _group_table(plan: Plan) -> Table:
    from anywidth.planning.plan_text import remark

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("group", overflow="fold")
    table.add_column("channels", justify="right", no_wrap=True)
    for heading in ("also made by", "read by", ""):
        table.add_column(heading, overflow="fold")
    for group in plan.groups.values():
        size = str(group.channels) + (f" by {group.unit}" if group.unit > 1 else "")
        others = [layer for layer in group.makers if layer != group.name]
        cells = (group.name, size, _few(others), _few(group.readers), remark(group))
        table.add_row(*map(escape, cells), style="dim" if group.fixed else None)
    return table


def _few(names: Sequence[str]) -> str:
    """One name per line; of more than three, the first two."""
    shown = names if len(names) <= 3 else [*names[:2], f"… {len(names) - 2} more"]
    return "\n".join(shown)
