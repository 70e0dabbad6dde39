"""The whole product on one machine, real, from one command: `python -m deploy.demo`, which `make demo` calls.

Starts an S3 endpoint, a Prefect server with its UI, a worker and the REST service, builds a small verifier, posts a job
over HTTP, follows it, and ends with what it measured and where everything is. Ends all it started, also on Ctrl-C,
SIGTERM or failure. With `--stay` (`make up`) it starts the same on what an earlier run left, posts nothing, and stays.

Exit code 0 only if the job succeeded, the tuned head beats the base in mean acceptance length, and what lies in S3 is
what its manifest says. report.json in the demo's directory has the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import yaml
from rich.console import Console
from rich.markdown import Markdown

from deploy import services, verdict
from deploy.follow import follow, post_job
from deploy.services import Service
from fastmtp import procs
from fastmtp.config import JobSpec
from fastmtp.errors import FastMTPError, ProcessError
from fastmtp.protocol import Report
from fastmtp.stage import write_atomic
from fastmtp.table import acceptance_table

VERIFIER = Path(".cache/tiny-verifier")
JOB = Path(__file__).with_name("demo-job.yaml")
BUCKET = "models"
# What a run leaves in its directory, and the next one removes.
LEFT_BEHIND = ("s3", "prefect", "jobs", "logs", "rclone.conf", "env", "report.json")
DATABASE = "fastmtp.db"


@dataclass(frozen=True)
class Stack:
    """Everything that runs, once all of it answers."""

    s3: Service
    prefect: Service
    worker: Service
    api: Service

    def check(self) -> None:
        """Raise ProcessError when one of them has died."""
        for service in (self.s3, self.prefect, self.worker, self.api):
            status = service.child.poll()
            if status is not None:
                last = procs.tail(service.log)
                raise ProcessError(f"{service.name} ended with status {status}. Last lines of {service.log}:\n{last}")


def main(argv: list[str] | None = None) -> int:
    """Entry of the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--stay", action="store_true", help="start everything, post nothing, stay until Ctrl-C")
    parser.add_argument("--keep", action="store_true", help="keep what an earlier run left (always with --stay)")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="where everything lies (default .demo)")
    chosen = parser.parse_args(argv)
    # Long lines are for the reader's terminal to break: a URI that is cut cannot be copied.
    console = Console(soft_wrap=True, highlight=False)
    signal.signal(signal.SIGTERM, _on_sigterm)
    # A shell starts what it puts in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _locked(chosen.dir), contextlib.ExitStack() as stack:
            if not (chosen.keep or chosen.stay):
                _clear(chosen.dir)
            started = _start(stack, chosen.dir, console)
            if chosen.stay:
                _stay(started, chosen.dir, console)
            return _demonstrate(started, chosen.dir, console)
    except KeyboardInterrupt:
        console.print("Stopped; everything that was started has ended.")
        return 130
    except (FastMTPError, RuntimeError, httpx.HTTPError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 1


def _start(stack: contextlib.ExitStack, root: Path, console: Console) -> Stack:
    """Start every process, side by side where they do not need each other, and wait until all answer."""
    begun = time.monotonic()
    console.print(f"Starting everything in {root}; logs are in {root / 'logs'}.", markup=False)
    key_id, secret = f"DEMO{secrets.token_hex(8).upper()}", secrets.token_hex(20)
    s3 = stack.enter_context(services.s3_endpoint(root, key_id=key_id, secret=secret, buckets=[BUCKET]))
    prefect = stack.enter_context(services.prefect_server(root))
    _build_verifier(root, console)
    s3.wait()
    prefect.wait()
    _register_deployments(root, prefect)
    env = {**prefect.env, **s3.env, **_policy(root)}
    api = stack.enter_context(services.rest_api(root, env=env))
    worker = stack.enter_context(services.worker(root, env=env))
    api.wait()
    worker.wait()
    _write_env(root, {**s3.env, "PREFECT_API_URL": prefect.env["PREFECT_API_URL"]})
    console.print(f"Everything answers after {time.monotonic() - begun:.0f} s.")
    console.print(
        f"  REST service  {api.url}/docs\n  Prefect UI    {prefect.url}\n  S3 endpoint   {s3.url}", markup=False
    )
    return Stack(s3, prefect, worker, api)


def _policy(root: Path) -> dict[str, str]:
    """Where jobs work, and what they may name."""
    return {
        "FASTMTP_WORK_DIR": str((root / "jobs").resolve()),
        "FASTMTP_ALLOWED_SOURCES": str(VERIFIER.resolve()),
        "FASTMTP_ALLOWED_DESTINATIONS": f"s3://{BUCKET}",
    }


def _build_verifier(root: Path, console: Console) -> None:
    """Make the small verifier, or find that it is there: about three minutes the first time, then at once."""
    log = root / "logs" / "tiny-verifier.log"
    argv = [sys.executable, "-m", "fastmtp", "tiny-verifier", str(VERIFIER), "--json"]
    with console.status("Building the small verifier (the first time takes about three minutes) ...") as status:

        def show() -> None:
            last = procs.tail(log, lines=1)
            status.update(f"Small verifier: {last}" if last else "Small verifier ...")

        code = procs.run(argv, log=log, stdout=log.with_suffix(".out"), on_poll=show if console.is_terminal else None)
    if code != 0:
        raise ProcessError(f"The small verifier could not be built. Last lines of {log}:\n{procs.tail(log)}")
    console.print(f"Small verifier: {VERIFIER}")


def _register_deployments(root: Path, prefect: Service) -> None:
    log = root / "logs" / "deployments.log"
    if procs.run([sys.executable, "-m", "flows.deployments"], log=log, env=prefect.env) != 0:
        raise ProcessError(f"The deployments could not be registered. Last lines of {log}:\n{procs.tail(log)}")


def _demonstrate(stack: Stack, root: Path, console: Console) -> int:
    """Post the demo's job, follow it to its end, and say what came of it."""
    with httpx.Client(base_url=stack.api.url, timeout=60, trust_env=False) as api:
        job = post_job(api, request_body())
        console.print(
            f"Posted job {job['id']}; following {stack.api.url}/v1/fine_tuning/jobs/{job['id']}", markup=False
        )
        job = follow(api, job["id"], console, stack.check)
    report = verdict.report_of(job)
    faults = verdict.faults_of(report, stack.s3.env)
    write_atomic(root / "report.json", report.model_dump_json(indent=1).encode())
    _show(report, job, root, console)
    for fault in faults:
        console.print(f"demo: {fault}", style="red", markup=False)
    if not faults:
        console.print(f"{len(report.artifacts)} files in S3 read back and are what their manifest says.", style="green")
    return 1 if faults else 0


def request_body() -> dict[str, Any]:
    """The demo's job as the service takes it, with absolute paths: a worker has its own working directory."""
    spec = JobSpec.from_yaml(JOB)
    given = yaml.safe_load(JOB.read_text("utf-8"))
    parts = {part: {k: v for k, v in given[part].items() if k != "prompts"} for part in ("data", "evaluate")}
    return {
        "model": str(Path(spec.model).resolve()),
        "training_file": str(Path(*spec.data.sources).resolve()),
        "validation_file": str(Path(*spec.evaluate.sets.values()).resolve()),
        "seed": spec.train.seed,
        "suffix": "demo",
        "method": {
            "type": "mtp",
            "mtp": {**parts, "train": given["train"], "gate": given["gate"], "publish": given["publish"]},
        },
    }


def _show(report: Report, job: dict[str, Any], root: Path, console: Console) -> None:
    heads = {head: getattr(report, head) for head in ("base", "tuned", "incumbent") if getattr(report, head)}
    if heads:
        console.print(Markdown(acceptance_table(heads)))
    if report.greedy_identical:
        console.print(f"Greedy answers identical: {report.greedy_identical[0]} of {report.greedy_identical[1]}.")
    console.print("Seconds: " + ", ".join(f"{stage} {took:.0f}" for stage, took in report.seconds.items()))
    workdir = root / "jobs" / report.job_id
    places = {
        "Published": report.published or "nothing",
        "Plot": workdir / "evaluation" / "acceptance.png",
        "Work": workdir,
        "Logs": f"{root / 'logs'} and {workdir / 'logs'}",
        "Report": root / "report.json",
        "Prefect run": job["attempts"][-1]["url"] if job["attempts"] else "none",
    }
    for name, place in places.items():
        console.print(f"  {name:<12}{place}", markup=False)
    console.print("To look closer: `make up` starts the same services on what this run left.")


def _stay(stack: Stack, root: Path, console: Console) -> NoReturn:
    body = json.dumps(request_body())
    console.print(f"\nCredentials for S3 and Prefect's URL: source {root / 'env'}", markup=False)
    console.print("To post the demo's job:\n", markup=False)
    command = f"curl -s {stack.api.url}/v1/fine_tuning/jobs -H 'content-type: application/json' -d '{body}'"
    console.print(command, markup=False)
    console.print("\nCtrl-C ends everything.")
    while True:
        stack.check()
        time.sleep(1)


def _write_env(root: Path, values: dict[str, str]) -> None:
    """A file to source, readable by its owner only: it holds the S3 secret of this start."""
    path = root / "env"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.writelines(f"export {name}={value}\n" for name, value in values.items())


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the directory, so that two demos never share, or clear, one."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"Another demo runs in {root}; end it, or name another --dir.") from None
        yield


def _clear(root: Path) -> None:
    """Remove what an earlier run left, by name: the directory may be one that holds other things."""
    for name in LEFT_BEHIND:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in root.glob(f"{DATABASE}*"):
        path.unlink()


def _on_sigterm(_number: int, _frame: types.FrameType | None) -> NoReturn:
    # SystemExit unwinds the stack, which ends what was started.
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
