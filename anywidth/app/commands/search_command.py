"""`anywidth search`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anywidth.app.interrupts import exit_code
from anywidth.app.own_command import own_command
from anywidth.app.showing.output import console, note, say
from anywidth.app.tasks import command_options as options
from anywidth.errors import AnywidthError, errors_about

if TYPE_CHECKING:
    from anywidth.app.tasks.search_run import Searched
    from anywidth.app.tasks.trained import Trained
    from anywidth.searching.budgets import Budget

# How far the load of a device may be from that of its latency table.
_BUSY = 0.25


def search(
    run: options.RunFolder,
    macs: Annotated[
        str | None, typer.Option(help="Budgets in multiply-adds of one example: 150M,300M.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Budgets in time per example: 5ms, or 0.5ms,1ms.")
    ] = None,
    parameters: Annotated[str | None, typer.Option(help="Budgets in parameters: 1M.")] = None,
    method: Annotated[
        Literal["greedy", "evolution"],
        typer.Option(help="Evolution continues from the result of greedy; it takes longer."),
    ] = "greedy",
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; if not given, RUN/search.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a search that was stopped or killed.")
    ] = False,
    latencies: Annotated[
        Path | None,
        typer.Option(help="A latency table, or the times of --probes. If not given, measured now."),
    ] = None,
    other_device: Annotated[
        bool, typer.Option("--other-device", help="Allow a table of another device.")
    ] = False,
    probes: Annotated[
        Path | None,
        typer.Option(
            help="Only write NAME.anywidth, to time on another machine with "
            "`python -m anywidth_runtime measure NAME.anywidth`."
        ),
    ] = None,
    device: options.Device = "auto",
    model: options.Model = None,
    trust: options.Trust = False,
    data_dir: options.DataDir = None,
    eval_dir: options.EvalDir = None,
) -> None:
    """Find how many channels each layer should have for a budget, without training.

    Configurations are judged on training images, never on test images; for
    games, by the score. The best are calibrated and compared with the uniform
    width of the same cost. If nothing is better, that width is the answer.

    The results are channels-BUDGET.json, which train, export, spectrum and
    predict take as --channels, and search.json and search.png. Ctrl-C keeps
    what was found.

    Examples:

      anywidth search runs/us --macs 150M,300M

      anywidth search runs/us --latency 0.5ms --method evolution

      anywidth spectrum runs/us --channels runs/us/search/channels-150M.json
    """
    from anywidth.app.runs.run import Run
    from anywidth.app.tasks.registry import open_trained
    from anywidth.distributed import local_device, rank, start_processes, stop_processes

    Run.open_finished(run)
    if probes is not None:
        _write_probes(open_trained(run, "cpu", with_data=False, trust=trust, model=model), probes)
        return
    budgets = _budgets(macs, latency, parameters)
    if latency is None and (latencies is not None or other_device):
        raise AnywidthError("--latencies and --other-device are for --latency: leave them out")
    from anywidth.app.tasks.search_run import SearchOptions, search_run

    start_processes(local_device(device))
    try:
        trained = open_trained(
            run, device, trust=trust, model=model, data_dir=data_dir, eval_dir=eval_dir
        )
        out = run / "search" if out is None else out
        options = SearchOptions(budgets, out, method, seed, resume, latencies, other_device)
        searched = search_run(trained, options)
        is_first = rank() == 0
        if is_first:
            _print(trained, searched, out)
    finally:
        stop_processes()
    if not searched.result.is_complete:
        if is_first:
            note("Stopped early: what was found until then is kept. The same command with")
            note("--resume continues.")
        raise typer.Exit(exit_code())


def _budgets(macs: str | None, latency: str | None, parameters: str | None) -> list[Budget]:
    from anywidth.searching.budgets import Budget

    given: dict[Any, tuple[str, str | None]] = {
        "macs": ("--macs", macs),
        "milliseconds": ("--latency", latency),
        "parameters": ("--parameters", parameters),
    }
    asked = {kind: (name, text) for kind, (name, text) in given.items() if text is not None}
    if len(asked) != 1:
        names = " and ".join(name for name, _ in asked.values()) or "no budget"
        raise AnywidthError(f"{names}: give one of --macs 150M, --latency 5ms, --parameters 1M")
    ((kind, (name, text)),) = asked.items()
    with errors_about(f"{name} {text}"):
        return [Budget.parse(kind, one) for one in str(text).split(",")]


def _print(trained: Trained, searched: Searched, out: Path) -> None:
    from anywidth.app.showing.search_results import channels_table, found_table
    from anywidth.app.tasks.search_run import TABLE_FILE, channels_file
    from anywidth.slimming.convert import plan_of

    result = searched.result
    console.print(channels_table(result, plan_of(trained.model)))
    console.print(found_table(result, trained.metrics))
    for one in result.found:
        if one.is_uniform:
            say(f"{one.budget}: nothing better than the uniform width was found; it is the result.")
    if searched.latencies is not None:
        table = searched.latencies
        how = "measured" if all(one.is_measured for one in result.found) else "predicted, not timed"
        say(f"Latencies of {table.device}: costs are {how}; the table is off by")
        say(f"  {100 * table.error:.1f} % (median of networks that took no part in fitting it).")
        if table.block > 1:
            say(f"  A layer is fastest there if its channels are multiples of {table.block}.")
        if abs(result.load - 1) > _BUSY:
            note(
                f"Note: networks took {result.load:.2f} times as long as when the table was "
                "measured, so costs were converted to the table's load. For the budget at today's "
                f"load, remove {out / TABLE_FILE} and search again."
            )
    say(f"Judged on {searched.judging.judged_on}: {result.passes} passes over them.")
    for remark in searched.remarks:
        note(f"Note: {remark}")
    files = [out / channels_file(one.budget) for one in result.found]
    say(f"Written: {', '.join(map(str, files))}, {out / 'search.json'} and {out / 'search.png'}")
    say("To measure it on test images:")
    allowed = trained.settings.allowance
    say(f"  {own_command('spectrum', trained.run.folder, '--channels', files[0], *allowed)}")
    say("To train it alone, with the same settings:")
    config = trained.run.folder / "config.json"
    say(f"  {own_command('train', '--config', config, '--channels', files[0], *allowed)}")


def _write_probes(trained: Trained, path: Path) -> None:
    from anywidth.deploying.bundling import write_probes

    if path.suffix != ".anywidth" or not path.parent.is_dir():
        raise AnywidthError(f"--probes {path}: expected NAME.anywidth in an existing folder")
    write_probes(trained.model, path)
    say(f"Written: {path}. On the other machine, which needs anywidth-runtime alone:")
    say(f"  python -m anywidth_runtime measure {shlex.quote(path.name)}")
    say("Then bring its .latency.json back:")
    back = path.with_name(f"{path.name}.latency.json")
    search = own_command("search", trained.run.folder, "--latency", "5ms", "--latencies", back)
    say(f"  {search} --other-device")
