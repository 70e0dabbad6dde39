"""The whole chain in one working directory: which stage reads what of which, in what order, and how it ends.

`run` does all of it in this process; the flow runs the same stages one by one, each as `fastmtp run --only STAGE`. A
finished stage is found by its manifest and not done again. Importing this loads no torch; the stages that need it
import it when they run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastmtp.config import JobSpec
from fastmtp.errors import ConfigError, FastMTPError, GateRejected, InputError
from fastmtp.fetch import Allow, cached_model
from fastmtp.files import is_hub, is_local, local_path
from fastmtp.hashing import cache_directory
from fastmtp.hub import hub_snapshot
from fastmtp.preflight import Policy, check_job
from fastmtp.progress import Reporter
from fastmtp.protocol import STAGES, Artifact, Measurement, Report, Stage
from fastmtp.publish import fetch_incumbent, identity, publish_checkpoint
from fastmtp.stage import MANIFEST, Manifest, read_manifest, write_atomic
from fastmtp.table import size


@dataclass(frozen=True)
class Workdir:
    """Where a job keeps its parts. Each stage's result is a directory of its own."""

    root: Path

    @property
    def job_file(self) -> Path:
        return self.root / "job.yaml"

    @property
    def progress_file(self) -> Path:
        return self.root / "progress.jsonl"

    @property
    def report_file(self) -> Path:
        return self.root / "report.json"

    @property
    def head(self) -> Path:
        return self.root / "head"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def tuned(self) -> Path:
        return self.root / "tuned"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    @property
    def incumbent(self) -> Path:
        return self.root / "incumbent"

    @property
    def published(self) -> Path:
        return self.root / "published"

    def result_of(self, stage: Stage) -> Path | None:
        """The directory of a stage's result; preflight has none."""
        found = {
            "extract": self.head, "prepare": self.data, "train": self.tuned, "stitch": self.checkpoint,
            "evaluate": self.evaluation, "publish": self.published,
        }  # fmt: skip
        return found.get(stage)


def open_workdir(root: Path, spec: JobSpec) -> Workdir:
    """Make (or reuse) a working directory for `spec`. Raises InputError when the place cannot be written."""
    workdir = Workdir(root.resolve())
    try:
        workdir.root.mkdir(parents=True, exist_ok=True)
        write_atomic(workdir.job_file, spec.to_yaml().encode())
    except OSError as error:
        raise InputError(f"{root}: {error.strerror}.", mend="Name a directory that can be written.") from error
    return workdir


def run(spec: JobSpec, root: Path, *, job_id: str = "local", quiet: bool = False) -> Report:
    """Run every stage of a job and write `report.json`. A failure is reported there too, then raised.

    Raises:
        FastMTPError: a stage failed; GateRejected when everything ran and the gate said no.
    """
    workdir = open_workdir(root, spec)
    workdir.report_file.unlink(missing_ok=True)
    for stage in STAGES:
        if stage == "publish" and not wants_publishing(workdir, spec):
            continue
        try:
            run_one(stage, workdir, spec, quiet=quiet)
        except FastMTPError as error:
            build_report(workdir, job_id, {"code": error.code, "message": str(error), "stage": stage})
            raise
    report = build_report(workdir, job_id)
    if report.status == "rejected":
        raise GateRejected(str(report.gate.get("reason")))
    return report


def wants_publishing(workdir: Workdir, spec: JobSpec) -> bool:
    """Whether the evaluation's gate passed and the job names a destination."""
    return spec.publish is not None and bool(read_manifest(workdir.evaluation).summary["gate"]["passed"])


def run_one(stage: Stage, workdir: Workdir, spec: JobSpec, *, quiet: bool = False) -> dict[str, Any]:
    """Run one stage in this process. Returns its manifest as JSON-able data (for preflight: stage and summary only)."""
    with Reporter(stage, file=workdir.progress_file, quiet=quiet) as reporter:
        return _STAGES[stage](workdir, spec, reporter)


def build_report(workdir: Workdir, job_id: str, error: dict[str, str] | None = None) -> Report:
    """How the job ended, from the manifests of its stages; also written to `report.json`.

    Args:
        error: `code`, `message` and `stage` of what failed, if something did.
    """
    manifests: dict[str, Manifest] = {}
    for stage in STAGES:
        directory = workdir.result_of(stage)
        if directory and (directory / MANIFEST).is_file():
            manifests[stage] = read_manifest(directory)
    report = Report(job_id=job_id, status="failed" if error else "succeeded", error=error)
    report.seconds = {stage: round(manifest.seconds, 2) for stage, manifest in manifests.items()}
    if "evaluate" in manifests and not (error and error["stage"] == "evaluate"):
        summary = manifests["evaluate"].summary
        for name in ("base", "tuned", "incumbent"):
            if name in summary:
                setattr(report, name, Measurement.model_validate(summary[name]))
        report.gate = summary["gate"]
        report.greedy_identical = tuple(summary["greedy_identical"]) if summary["greedy_identical"] else None
        if not error and not report.gate["passed"]:
            report.status = "rejected"
    if "publish" in manifests and report.status == "succeeded":
        receipt = manifests["publish"].summary
        report.published = receipt["uri"]
        report.artifacts = [Artifact.model_validate(item) for item in receipt["artifacts"]]
    write_atomic(workdir.report_file, report.model_dump_json(indent=1).encode())
    return report


def resolve_model(model: str, reporter: Reporter | None = None) -> Path:
    """A local directory with the model: as named, or brought here from S3 or the hub (the caches are used)."""
    if is_local(model):
        return local_path(model).resolve()
    if model.startswith("s3://"):
        return cached_model(model, reporter or Reporter("preflight", quiet=True), _allowed)
    if not is_hub(model):
        raise InputError(
            f"{model} is neither a path, an s3:// prefix nor a hub id.", mend="Name one of these.", pointer="/model"
        )
    return hub_snapshot(model)


def _allowed(uri: str) -> None:
    """Raise ConfigError for a file that a version refers to and this service may not read."""
    Policy.from_env().require_source(uri, "/model")


def _allowed_beside(destination: str) -> Allow:
    """`_allowed`, for what lies outside the destination."""
    own = destination.rstrip("/") + "/"

    def allow(uri: str) -> None:
        if not uri.startswith(own):
            _allowed(uri)

    return allow


def _preflight(workdir: Workdir, spec: JobSpec, reporter: Reporter) -> dict[str, Any]:
    summary = check_job(spec, Policy.from_env())
    from fastmtp.serving import vllm_python

    summary["vllm_python"] = str(vllm_python())
    for warning in summary.get("warnings", ()):
        reporter.say(f"warning: {warning}")
    # A hub that did not answer just now may do so when the model is needed.
    if "family" in summary:
        _require_room(workdir, spec, summary)
        reporter.say(f"{summary['family']}, head of {summary['head_tensors']} tensors: everything is in place")
    return {"stage": "preflight", "summary": summary}


def _require_room(workdir: Workdir, spec: JobSpec, summary: dict[str, Any]) -> None:
    """Room for head, tuned head and stitched checkpoint. Unchanged shards are links on the model's own file system."""
    if is_local(spec.model):
        place = local_path(spec.model)
    else:
        place = next(path for path in (cache_directory(), *cache_directory().parents) if path.exists())
    linked = not is_hub(spec.model) and place.stat().st_dev == workdir.root.stat().st_dev
    needed = summary["stitch_bytes" if linked else "stitch_bytes_as_copy"] + 2 * summary["head_bytes"]
    free = shutil.disk_usage(workdir.root).free
    if needed > free:
        raise InputError(
            f"{workdir.root} has {size(free)} free; the job writes at least {size(needed)} there.",
            mend="Free space, or name a --workdir on another disk.",
        )


def _extract(workdir: Workdir, spec: JobSpec, reporter: Reporter) -> dict[str, Any]:
    from fastmtp.extract import extract

    return _dump(extract(resolve_model(spec.model, reporter), workdir.head, reporter, replace=True))


def _prepare(workdir: Workdir, spec: JobSpec, reporter: Reporter) -> dict[str, Any]:
    from fastmtp.data.prepare import prepare

    model = resolve_model(spec.model, reporter)
    return _dump(prepare(model, spec.data, workdir.data, reporter, evaluated=measured_on(spec), replace=True))


def measured_on(spec: JobSpec) -> frozenset[str]:
    """Roots of the conversations that the job's evaluation asks, which must not be trained on."""
    from fastmtp.data.prompts import roots_of

    return roots_of(map(spec.evaluate.reading, spec.evaluate.sets.values()), spec.evaluate.num_prompts)


def _train(workdir: Workdir, spec: JobSpec, reporter: Reporter) -> dict[str, Any]:
    from fastmtp.train import train

    model = resolve_model(spec.model, reporter)
    return _dump(train(model, workdir.head, workdir.data, spec.train, workdir.tuned, reporter, replace=True))


def _stitch(workdir: Workdir, spec: JobSpec, reporter: Reporter) -> dict[str, Any]:
    from fastmtp.stitch import stitch

    return _dump(stitch(resolve_model(spec.model, reporter), workdir.tuned, workdir.checkpoint, reporter, replace=True))


def _evaluate(workdir: Workdir, spec: JobSpec, reporter: Reporter) -> dict[str, Any]:
    from fastmtp.evaluate import evaluate
    from fastmtp.evaluation.report import Head

    model = resolve_model(spec.model, reporter)
    heads: dict[Head, Path] = {"base": model, "tuned": workdir.checkpoint}
    if spec.publish:
        allow = _allowed_beside(spec.publish.uri)
        found = fetch_incumbent(spec.publish.uri, model, workdir.incumbent, reporter, allow)
        if found:
            heads["incumbent"] = workdir.incumbent
    return _dump(evaluate(heads, spec.evaluate, spec.gate, workdir.evaluation, reporter, replace=True))


def _publish(workdir: Workdir, spec: JobSpec, reporter: Reporter) -> dict[str, Any]:
    if spec.publish is None:
        raise ConfigError("/publish: the job names no destination.", mend="Add publish.uri.", pointer="/publish")
    evaluation = read_manifest(workdir.evaluation).summary
    if not evaluation["gate"]["passed"]:
        raise GateRejected(evaluation["gate"]["reason"])
    model = resolve_model(spec.model, reporter)
    about = {"verifier": identity(model), "model": spec.model, "evaluation": evaluation}
    return _dump(
        publish_checkpoint(
            workdir.checkpoint, spec.publish, workdir.published, about, reporter, model=model,
            allow=_allowed_beside(spec.publish.uri),
        )
    )  # fmt: skip


def _dump(manifest: Manifest) -> dict[str, Any]:
    return manifest.model_dump(mode="json")


_STAGES: dict[Stage, Callable[[Workdir, JobSpec, Reporter], dict[str, Any]]] = {
    "preflight": _preflight,
    "extract": _extract,
    "prepare": _prepare,
    "train": _train,
    "stitch": _stitch,
    "evaluate": _evaluate,
    "publish": _publish,
}
