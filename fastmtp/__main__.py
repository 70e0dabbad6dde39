"""The `fastmtp` command: every stage as a verb, and `run` for the whole chain.

Exit codes: 0 done, 2 bad input, 3 the gate said no, 1 anything else. Results go to stdout, everything meant for a
person watching to stderr; with --json stdout is one JSON object, also when something fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fastmtp import commands
from fastmtp.console import AsJson, print_result
from fastmtp.data.commands import app as data_app
from fastmtp.errors import FastMTPError, GateRejected, InputError
from fastmtp.progress import Reporter
from fastmtp.protocol import STAGES, Measurement, Report, Stage

app = typer.Typer(
    help="Fine-tune a model's own multi-token-prediction head on your prompts, the way vLLM serves it.",
    epilog="Start with: fastmtp tiny-verifier ./tiny   then: fastmtp run --help",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip

JOB_EXAMPLE = """
[bold]A job file[/bold]

  model: ./tiny\n
  data:     {prompts: ./tiny/prompts-train.jsonl, max_samples: 600, max_new_tokens: 192}\n
  train:    {lr: 1.0e-3, epochs: 4, batch_tokens: 2048}\n
  evaluate: {prompts: ./tiny/prompts-test.jsonl, num_prompts: 96, max_tokens: 192}\n
  gate:     {min_gain: 0.02, min_drafts: 1000}\n
  publish:  {uri: "file:///tmp/published/"}
"""


class StitchMode(StrEnum):
    """Values of `stitch --mode`."""

    auto = "auto"
    reflink = "reflink"
    hardlink = "hardlink"
    copy = "copy"


JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file; `fastmtp run --help` shows one.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, s3:// prefix or hub id.")]
Out = Annotated[Path, typer.Option("--out", help="Directory for the result; it must be new or empty.")]


@app.command(epilog="Example: fastmtp tiny-verifier ./tiny --seed 0")
def tiny_verifier(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the checkpoint.")],
    seed: Annotated[int, typer.Option(help="Seed of everything random in it.")] = 0,
    text: Annotated[Path | None, typer.Option(help="JSONL of prompts and answers to train it on.")] = None,
    verifier_steps: Annotated[int | None, typer.Option(help="Training steps of the verifier.")] = None,
    head_steps: Annotated[int | None, typer.Option(help="Training steps of its native head.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a small real verifier (qwen3_next, 2.7 M parameters) with a native MTP head, for trying things out."""
    from fastmtp import tiny
    from fastmtp.stage import sha256_file

    chosen: dict[str, Any] = dict(tiny.TEXT_DEFAULTS) if text else {}
    if text and not text.is_file():
        raise InputError(f"{text} is no file.", mend="--text takes a JSONL file of prompts and answers.")
    given = {"verifier_steps": verifier_steps, "head_steps": head_steps}
    chosen |= {name: value for name, value in given.items() if value is not None}
    recipe = tiny.Recipe(seed=seed, text_sha256=sha256_file(text) if text else None, **chosen)
    with Reporter("preflight", label="tiny-verifier") as reporter:
        manifest = tiny.build(out, recipe, reporter, text=text)
    print_result(manifest.model_dump(mode="json"), as_json, f"{out}: {manifest.summary['parameters']} parameters")


@app.command(epilog="Example: fastmtp inspect Qwen/Qwen3-Next-80B-A3B-Instruct --json")
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a model is and whether a job can use it: family, head, layout, types, sizes, and everything wrong.

    Reads config, index and headers, no tensor, from disk, S3 or the hub. Exit code 2 when a job cannot use it as it is.
    """
    from fastmtp.inspection import inspect as look_at
    from fastmtp.table import inspection_table

    found = look_at(model)
    if as_json:
        print_result(found.model_dump(mode="json"), as_json, "")
    else:
        Console().print(inspection_table(found))
    if not found.usable:
        raise typer.Exit(InputError.exit_code)


@app.command(epilog="Example: fastmtp families --json")
def families(
    markdown: Annotated[bool, typer.Option(help="Print the table of the documentation.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the model families whose heads are known, and how each stores and runs its head."""
    from fastmtp.families import families_table, rows
    from fastmtp.table import families_list

    if as_json or markdown:
        print_result({"families": rows()}, as_json, families_table())
    else:
        Console().print(families_list(rows()))


@app.command(epilog="Example: fastmtp extract ./tiny --out ./head")
def extract(model: Model, out: Out, as_json: AsJson = False) -> None:
    """Take the native head out of a checkpoint: its bytes only, by ranged reads, wherever it lies."""
    from fastmtp.extract import extract as run_extract
    from fastmtp.table import size

    with Reporter("extract") as reporter:
        manifest = run_extract(model, out, reporter)
    text = f"{out}: {len(manifest.summary['tensors'])} tensors, {size(manifest.summary['bytes'])}"
    print_result(manifest.model_dump(mode="json"), as_json, text)


@app.command(epilog="Example: fastmtp prepare job.yaml --out ./data")
def prepare(job: JobFile, out: Out, as_json: AsJson = False) -> None:
    """Let the verifier answer the job's prompts, and store its hidden states."""
    from fastmtp.config import JobSpec
    from fastmtp.data.prepare import prepare as run_prepare
    from fastmtp.pipeline import measured_on, resolve_model

    spec = JobSpec.from_yaml(job)
    with Reporter("prepare") as reporter:
        model = resolve_model(spec.model, reporter)
        manifest = run_prepare(model, spec.data, out, reporter, evaluated=measured_on(spec))
    summary = manifest.summary
    text = f"{out}: {summary['rows']} of {summary['rows_in']} rows, {summary['tokens_supervised']} supervised tokens"
    print_result(manifest.model_dump(mode="json"), as_json, text)


@app.command(epilog="Example: fastmtp train job.yaml --head ./head --data ./data --out ./tuned")
def train(
    job: JobFile,
    head: Annotated[Path, typer.Option(help="Result of extract.")],
    data: Annotated[Path, typer.Option(help="Result of prepare.")],
    out: Out,
    dry_run: Annotated[bool, typer.Option(help="Say what would be done and what it takes, do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune the head recursively; the result holds a head like the one that went in.

    A run that was stopped or killed goes on where it was when the same command is given again.
    """
    from fastmtp.config import JobSpec
    from fastmtp.pipeline import resolve_model
    from fastmtp.train import plan
    from fastmtp.train import train as run_train

    spec = JobSpec.from_yaml(job)
    if dry_run:
        found = plan(resolve_model(spec.model), head, data, spec.train, out)
        print_result(found, as_json, str(found["text"]))
        return
    with Reporter("train") as reporter:
        manifest = run_train(resolve_model(spec.model, reporter), head, data, spec.train, out, reporter)
    best = manifest.summary["best"]["mean_acceptance_length"]
    text = f"{out}: {manifest.summary['steps']} steps, held-out mean acceptance length {best:.3f}; see {out}/curves.png"
    print_result(manifest.model_dump(mode="json"), as_json, text)


@app.command(epilog="Example: fastmtp stitch ./tiny --head ./tuned --out ./checkpoint")
def stitch(
    model: Model,
    head: Annotated[Path, typer.Option(help="Result of train or extract, or a .safetensors file.")],
    out: Out,
    mode: Annotated[
        StitchMode, typer.Option(help="How unchanged shards get there; auto: the first of the others that works.")
    ] = StitchMode.auto,
    mend: Annotated[
        bool, typer.Option("--mend", help="Also list every tensor in the index, and drop a wrapper's prefix.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put a head into a new checkpoint directory; every other byte stays as it is, and that is proved.

    Unchanged shards become reflinks, hard links or copies; shards that hold the head are streamed once. A hard link is
    the source's own file: take --mode copy if you mean to edit shards in place later.
    """
    from fastmtp.pipeline import resolve_model
    from fastmtp.stitch import stitch as run_stitch
    from fastmtp.table import size

    with Reporter("stitch") as reporter:
        manifest = run_stitch(resolve_model(model, reporter), head, out, reporter, mode=mode.value, mend=mend)
    found = manifest.summary
    links = sorted(set(found["links"].values()))
    text = f"{out}: {found['tensors_changed']} of {found['tensors_of_head']} tensors changed, "
    text += f"{size(found['bytes_written'])} written" + (
        f", {len(found['links'])} shards as {links[0]}s" if links else ""
    )
    print_result(manifest.model_dump(mode="json"), as_json, text)


@app.command(epilog="Example: fastmtp evaluate job.yaml --base ./tiny --tuned ./checkpoint --out ./evaluation")
def evaluate(
    job: JobFile,
    base: Annotated[str, typer.Option(help="The verifier as it came.")],
    tuned: Annotated[Path, typer.Option(help="Result of stitch.")],
    out: Out,
    base_url: Annotated[str | None, typer.Option(help="A vLLM server of base that runs already.")] = None,
    tuned_url: Annotated[str | None, typer.Option(help="A vLLM server of tuned that runs already.")] = None,
    plain_url: Annotated[str | None, typer.Option(help="One of base that does not speculate.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure acceptance per draft position with vLLM, before and after. Exit code 3 when the gate says no.

    With URLs nothing is started: give both, and the third one to have greedy answers compared.
    """
    from fastmtp.config import JobSpec
    from fastmtp.evaluate import evaluate as run_evaluate
    from fastmtp.evaluation.report import Head
    from fastmtp.pipeline import resolve_model

    spec = JobSpec.from_yaml(job)
    urls = {"base": base_url, "tuned": tuned_url, "plain": plain_url}
    named = {name: url for name, url in urls.items() if url}
    if named and not (base_url and tuned_url):
        raise InputError("With servers of your own both heads need one.", mend="Give --base-url and --tuned-url.")
    with Reporter("evaluate") as reporter:
        heads: dict[Head, Path] = {"base": resolve_model(base, reporter), "tuned": tuned}
        manifest = run_evaluate(heads, spec.evaluate, spec.gate, out, reporter, urls=named)
    summary = manifest.summary
    _show({name: Measurement.model_validate(summary[name]) for name in heads}, as_json)
    gate = summary["gate"]
    print_result(manifest.model_dump(mode="json"), as_json, f"gate: {gate['reason']}; see {out}/report.html")
    if not gate["passed"]:
        raise typer.Exit(GateRejected.exit_code)


for _command, _example in commands.WITH_EXAMPLES:
    app.command(epilog=f"Example: fastmtp {_example}")(_command)
app.add_typer(data_app, name="data")


@app.command(epilog=JOB_EXAMPLE)
def run(
    job: JobFile,
    workdir: Annotated[Path | None, typer.Option(help="Directory of all results; runs/JOB when unset.")] = None,
    only: Annotated[str | None, typer.Option(help=f"One stage alone: {', '.join(STAGES)}.")] = None,
    job_id: Annotated[str, typer.Option(help="Name of the job in the report.")] = "local",
    dry_run: Annotated[bool, typer.Option(help="Check everything, say what would be done, do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a whole job without any service: WORKDIR/report.json at the end. What is finished is not done again."""
    from fastmtp import pipeline
    from fastmtp.config import JobSpec
    from fastmtp.preflight import Policy, check_job

    spec = JobSpec.from_yaml(job)
    root = workdir or Path("runs") / job.stem
    if dry_run:
        summary = check_job(spec, Policy.from_env())
        print_result({"plan": list(STAGES), "workdir": str(root), **summary}, as_json, _plan(summary, root))
        return
    if only is not None:
        if only not in STAGES:
            raise InputError(f"--only {only} is no stage.", mend=f"Stages are {', '.join(STAGES)}.")
        stage: Stage = next(stage for stage in STAGES if stage == only)
        result = pipeline.run_one(stage, pipeline.open_workdir(root, spec), spec)
        print_result(result, as_json, json.dumps(result["summary"], indent=1))
        return
    try:
        report = pipeline.run(spec, root, job_id=job_id)
    except GateRejected:
        report = Report.model_validate_json((root / "report.json").read_bytes())
    _finish(report, root, as_json)


def _finish(report: Report, root: Path, as_json: bool) -> None:
    figures = {name: getattr(report, name) for name in ("base", "tuned", "incumbent") if getattr(report, name)}
    _show(figures, as_json)
    where = report.published or "nothing published"
    text = f"{report.status}: {report.gate.get('reason', '')}\n{where}\nreport: {root}/report.json"
    print_result(report.model_dump(mode="json"), as_json, text)
    if report.status == "rejected":
        raise typer.Exit(GateRejected.exit_code)


def _plan(summary: dict[str, Any], root: Path) -> str:
    found = ", ".join(f"{name}: {value}" for name, value in summary.items())
    return f"{found}\nwould run {' > '.join(STAGES)} in {root}"


def _show(figures: dict[str, Measurement], as_json: bool) -> None:
    from fastmtp.table import acceptance_table

    if figures:
        _print_markdown(acceptance_table(figures), stderr=as_json)


def _print_markdown(text: str, *, stderr: bool) -> None:
    from rich.markdown import Markdown

    Console(stderr=stderr).print(Markdown(text))


def _fail(error: FastMTPError) -> int:
    """One line on stderr, and the error as JSON on stdout when JSON was asked for."""
    if "--json" in sys.argv:
        found = {"code": error.code, "message": str(error), "pointer": getattr(error, "pointer", "")}
        sys.stdout.write(json.dumps({"error": found}) + "\n")
    sys.stderr.write(f"fastmtp: {error}\n")
    return error.exit_code


def _on_sigterm(_number: int, _frame: types.FrameType | None) -> NoReturn:
    # SystemExit runs every `finally` on the way out, which is what ends our own children.
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Entry of the command."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    # Threads that spin while they wait starve every other process of a small machine, our own server among them: two
    # such programs on two cores ran 30 times slower than with threads that sleep. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Other people's progress bars and warnings would stand between ours.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except FastMTPError as error:
        sys.exit(_fail(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
