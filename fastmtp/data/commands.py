"""The verbs about prepared data: `fastmtp data inspect`. What they need is imported when they run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastmtp.console import AsJson, print_result
from fastmtp.errors import InputError
from fastmtp.files import is_hub

if TYPE_CHECKING:
    from fastmtp.data.inspect import DataInspection, Sample

app = typer.Typer(help="Look at prepared data.", no_args_is_help=True)

_BAR = 40
_SHOWN = 1200  # characters of a part of a row that are shown, half of them from its end


@app.callback()
def data() -> None:
    """Look at prepared data."""


@app.command(epilog="Example: fastmtp data inspect job.yaml")
def inspect(
    source: Annotated[Path, typer.Argument(metavar="JOB|DATA", help="A job file, or a result of prepare.")],
    workdir: Annotated[Path | None, typer.Option(help="The job's working directory; runs/JOB when unset.")] = None,
    model: Annotated[str | None, typer.Option(help="Whose tokenizer shows rows; the job's model when unset.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where the plot goes; beside the data when unset.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what was prepared: rows, rejected and why, lengths (a plot too), what is supervised, and show three rows."""
    from fastmtp.data.inspect import inspect_data, plot_lengths
    from fastmtp.data.store import read_index

    directory, job = _place(source, workdir)
    found = inspect_data(directory, _tokenizer_of(model, job))
    target = plot or directory.parent / f"{directory.name}-tokens.png"
    plot_lengths(read_index(directory), target)
    if as_json:
        print_result(found.model_dump(mode="json") | {"adds_up": found.adds_up, "plot": str(target)}, as_json, "")
    else:
        _show(found, target)


def _place(source: Path, workdir: Path | None) -> tuple[Path, Path | None]:
    """The data directory, and the job file that tells its model."""
    if source.is_dir():
        job = source.resolve().parent / "job.yaml"
        return source, job if job.is_file() else None
    if not source.is_file():
        raise InputError(f"{source} is no job file and no directory.", mend="Name a job file or a result of prepare.")
    return (workdir or Path("runs") / source.stem) / "data", source


def _tokenizer_of(model: str | None, job: Path | None) -> str | Path | None:
    from fastmtp.config import JobSpec
    from fastmtp.pipeline import resolve_model

    if model is None and job is not None:
        model = JobSpec.from_yaml(job).model
    if model is None or is_hub(model):
        return model  # of a hub's model only the tokenizer is brought here
    return resolve_model(model)


def _show(found: DataInspection, plot: Path) -> None:
    console = Console()
    grid = Table.grid(padding=(0, 2))
    for name, value in _lines(found):
        grid.add_row(Text(name, style="bold"), Text(value))
    grid.add_row(Text("plot", style="bold"), Text(str(plot)))
    console.print(grid)
    for sample in found.samples:
        console.print(sample_text(sample, colours=console.is_terminal), soft_wrap=True)


def _lines(found: DataInspection) -> Iterator[tuple[str, str]]:
    yield "data", found.directory
    counted = "" if found.adds_up else " (these do not add up: the manifest is not of these rows)"
    rejected = sum(found.rejected.values())
    yield "conversations", f"{found.rows_in:,} in: {found.conversations:,} used, {rejected:,} rejected{counted}"
    for reason, count in sorted(found.rejected.items(), key=lambda item: -item[1]):
        yield "", f"{count:,} {reason}"
    yield "rows", f"{found.rows:,}, {found.rows_holdout:,} of them held out"
    yield "tokens", f"{found.tokens:,}, {found.share_supervised:.1%} supervised; states: {found.hidden_states}"
    yield "answers", ", ".join(f"{count:,} ended by {finish}" for finish, count in sorted(found.finish.items()))
    yield "lengths", f"{found.shortest:,} to {found.longest:,} tokens, median {found.median:,}"
    most = max(one.rows for one in found.histogram)
    for one in found.histogram:
        yield "", f"{one.begin:>7,} {'#' * round(_BAR * one.rows / most):<{_BAR}} {one.rows:,}"


def sample_text(sample: Sample, *, colours: bool) -> Text:
    """A row, its supervised parts green in a terminal, in [[ ]] elsewhere."""
    head = f"\n{sample.split} row {sample.key[:12]}, {sample.tokens:,} tokens, {sample.tokens_supervised:,} supervised,"
    text = Text(f"{head} ended by {sample.finish}\n", style="bold")
    for part in sample.parts:
        shown = _shortened(part.text)
        if part.supervised and not colours:
            shown = f"[[{shown}]]"
        text.append(shown, style="not bold green" if part.supervised else "not bold dim")
    if sample.token_ids:
        text.append("its text needs a tokenizer: give --model", style="not bold")
    return text


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    return f"{text[:half]}\n... {len(text) - _SHOWN:,} characters more ...\n{text[-half:]}"
