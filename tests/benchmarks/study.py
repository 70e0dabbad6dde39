"""`make study`: what each recursion and each loss is worth, on the small verifier through a real vLLM, several seeds.

Everything lies under `.bench/study/`; what is finished is not done again, so a study that was stopped goes on. Ends
with two tables, also in `study.md`: acceptance as vLLM counts it, mean and spread over seeds of the training; and, for
the head as it came and a tuned one, the walk over the answers that vLLM gave against vLLM's own counters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from fastmtp.acceptance import measurement
from fastmtp.config import JobSpec, SamplingConfig, TrainConfig
from fastmtp.data.prepare import prepare
from fastmtp.data.prompts import first_conversations
from fastmtp.data.rendering import Renderer
from fastmtp.evaluation.reference import reference
from fastmtp.extract import extract
from fastmtp.progress import Reporter
from fastmtp.protocol import Measurement
from fastmtp.serving import Launch, Request, serve
from fastmtp.stage import write_atomic
from fastmtp.stitch import stitch
from fastmtp.tiny import Recipe, build
from fastmtp.train import train

ROOT = Path(".bench/study")
JOB = Path("deploy/demo-job.yaml")
VARIANTS: dict[str, dict[str, object]] = {
    "serving, ce": {},
    "plain, ce": {"recursion": "plain"},
    "serving, kl": {"loss": "kl"},
    "serving, tv": {"loss": "tv"},
    "serving, ce + tv": {"loss": {"ce": 0.5, "tv": 0.5}},
}


class Study:
    """One verifier, its rows, and the heads trained on them."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.model, self.head, self.data = ROOT / "verifier", ROOT / "head", ROOT / "data"
        with Reporter("preflight", label="verifier") as reporter:
            build(self.model, Recipe(), reporter)
        with Reporter("extract") as reporter:
            extract(self.model, self.head, reporter, replace=True)
        with Reporter("prepare") as reporter:
            prepare(self.model, self._here(spec).data, self.data, reporter, replace=True)
        source = next(iter(self._here(spec).evaluate.sets.values()))
        renderer = Renderer.of(self.model, spec.evaluate.template_args)
        asked = first_conversations(source, spec.evaluate.num_prompts)
        self.prompts = [renderer.prompt_ids(one.prompt(), one.tools) for one in asked]

    def _here(self, spec: JobSpec) -> JobSpec:
        """The job with the prompts of this verifier."""
        text = json.dumps(spec.model_dump(mode="json")).replace(spec.model, str(self.model))
        return JobSpec.parse(json.loads(text))

    def tuned(self, name: str, config: TrainConfig) -> Path:
        """A stitched checkpoint trained under `config`."""
        place = ROOT / "runs" / f"{name} {config.seed}".replace(",", "").replace(" + ", "+").replace(" ", "-")
        with Reporter("train", label=f"{name}, seed {config.seed}") as reporter:
            train(self.model, self.head, self.data, config, place / "tuned", reporter, replace=True)
        with Reporter("stitch", quiet=True) as reporter:
            stitch(self.model, place / "tuned", place / "checkpoint", reporter, replace=True)
        return place / "checkpoint"

    def served(self, checkpoint: Path) -> tuple[Measurement, list[list[int]]]:
        """vLLM's counters for a checkpoint, and its answers."""
        record = checkpoint.with_name(f"{checkpoint.name}.served.json")
        if not record.is_file():
            config = self.spec.evaluate
            longest = max(map(len, self.prompts)) + config.max_tokens + config.num_speculative_tokens + 1
            requests = [Request(prompt, config.max_tokens) for prompt in self.prompts]
            launch = Launch.of(config, checkpoint, longest, config.num_speculative_tokens)
            with serve(launch, record.with_suffix(".log")) as server:
                before = server.counters()
                sampling = SamplingConfig(temperature=config.temperatures[0])
                answers = server.generate(requests, sampling, config.concurrency)
                counted = server.counters().since(before)
            found = measurement(counted.drafts, counted.accepted)
            value = {"figures": found.model_dump(), "answers": [list(answer.token_ids) for answer in answers]}
            write_atomic(record, json.dumps(value).encode())
        value = json.loads(record.read_bytes())
        return Measurement.model_validate(value["figures"]), value["answers"]

    def walked(self, checkpoint: Path, answers: list[list[int]]) -> Measurement:
        """The walk of a checkpoint's head over given answers, on states of a fresh forward pass."""
        answered = list(zip(self.prompts, answers, strict=True))
        steps = self.spec.evaluate.num_speculative_tokens
        with Reporter("evaluate", quiet=True) as reporter:
            found = reference(self.model, {"tuned": checkpoint}, {("tuned", "study"): answered}, {}, steps, reporter)
        return found.walks[0].walked


def main() -> None:
    """Run the study and print its tables."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    chosen = parser.parse_args()
    study = Study(JobSpec.from_yaml(JOB))
    base, answers = study.served(study.model)
    found: dict[str, list[Measurement]] = {"as it came": [base]}
    checks = {"as it came": (base, study.walked(study.model, answers))}
    for seed in chosen.seeds:
        for name in chosen.variants:
            config = TrainConfig.model_validate(study.spec.train.model_dump() | VARIANTS[name] | {"seed": seed})
            checkpoint = study.tuned(name, config)
            figures, given = study.served(checkpoint)
            found.setdefault(name, []).append(figures)
            if name == "serving, ce" and seed == chosen.seeds[0]:
                checks["tuned (serving, ce)"] = (figures, study.walked(checkpoint, given))
            _write(found, checks)
    print(_write(found, checks))


def _write(found: dict[str, list[Measurement]], checks: dict[str, tuple[Measurement, Measurement]]) -> str:
    text = "\n".join([*_losses(found), "", *_walks(checks)]) + "\n"
    write_atomic(ROOT / "study.md", text.encode())
    return text


def _losses(found: dict[str, list[Measurement]]) -> Iterator[str]:
    yield "| head | seeds | position 0 | 1 | 2 | mean acceptance length |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, runs in found.items():
        rates = [_spread([run.acceptance[place] for run in runs]) for place in range(len(runs[0].acceptance))]
        lengths = _spread([run.mean_acceptance_length for run in runs])
        yield f"| {name} | {len(runs)} | {' | '.join(rates)} | {lengths} |"


def _spread(values: list[float]) -> str:
    """Mean, and standard deviation where there are several."""
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} +- {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def _walks(checks: dict[str, tuple[Measurement, Measurement]]) -> Iterator[str]:
    yield "| head | by | position 0 | 1 | 2 | mean acceptance length | drafts |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, (counted, walked) in checks.items():
        for by, figures in (("vLLM's counters", counted), ("the walk", walked)):
            rates = " | ".join(f"{rate:.3f}" for rate in figures.acceptance)
            yield f"| {name} | {by} | {rates} | {figures.mean_acceptance_length:.3f} | {figures.drafts} |"


if __name__ == "__main__":
    main()
