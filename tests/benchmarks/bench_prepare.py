"""Preparing 500 prompts, each backend against that engine's bare speed on the same prompts; states against that too.

Transformers' peer is its own `generate` over the same prompts in batches of the same size and like length, vLLM's is
vLLM's own benchmark client against the same server. Ours is the whole stage, from reading the prompts to the manifest
on disk, and the part of it before states are stored. Questions are GSM8K's where FASTMTP_GSM8K names its JSONL file,
word problems otherwise; FASTMTP_BENCH_PROMPTS asks fewer. The verifier is the study's where there is one, built
otherwise. Answers are greedy and end where they end, so times are per answered token. Six minutes on two cores; the
last line says which backend is faster here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fastmtp.config import DataConfig
from fastmtp.data.prepare import prepare
from fastmtp.data.rendering import Renderer
from fastmtp.data.wordproblems import generate
from fastmtp.progress import Reporter
from fastmtp.serving import Launch, Request, Server, serve, vllm_python
from fastmtp.stage import write_atomic
from fastmtp.tiny import Recipe, build
from tests.benchmarks.measure import Metric, metric

ROOT = Path(".bench/prepare")
STUDY = Path(".bench/study/verifier")
_LONGEST = 512
_WARM = 16  # prompts that each engine answers before it is timed
# vLLM's `bench serve`, without its command line, which asks for the metadata of a package of another name.
_CLIENT = (
    "import argparse\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)

# Seconds, and how many tokens were answered.
Timed = tuple[float, int]


def verifier() -> Path:
    """A small trained verifier."""
    if not (STUDY / "manifest.json").is_file():
        with Reporter("preflight", label="verifier") as reporter:
            build(ROOT / "verifier", Recipe(), reporter)
        return ROOT / "verifier"
    return STUDY


def questions(count: int) -> list[str]:
    """So many of GSM8K's, or of our own."""
    file = os.environ.get("FASTMTP_GSM8K")
    if not file:
        return [row["question"] for row in generate(count, seed=77)]
    lines = Path(file).read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["question"] for line in lines]


def fitting(renderer: Renderer, asked: list[str]) -> list[str]:
    """Without those that are too long for one of the engines: all of them answer the same prompts."""
    lengths = [len(renderer.prompt_ids([{"role": "user", "content": question}])) for question in asked]
    return [question for question, length in zip(asked, lengths, strict=True) if length + 136 <= _LONGEST]


def config_for(prompts: Path, **changes: object) -> DataConfig:
    """A job's data, with the benchmark's sizes."""
    values = {"prompts": str(prompts), "max_length": _LONGEST, "max_new_tokens": 128, "batch_size": 64}
    return DataConfig.model_validate(values | changes)


class Clock(Reporter):
    """Notes when the stage turns to storing states."""

    stored_at = 0.0

    def phase(self, message: str, total: float | None = None, unit: str = "") -> None:
        """As of any reporter."""
        if message.startswith("storing"):
            self.stored_at = time.perf_counter()
        super().phase(message, total, unit)


def ours(model: Path, config: DataConfig) -> tuple[Timed, Timed]:
    """The stage until states are stored, and the whole of it."""
    target = ROOT / "data"
    for left in (target, target.with_name(".data.progress")):  # of a run that was stopped, too
        shutil.rmtree(left, ignore_errors=True)
    clock = Clock("prepare", quiet=True)
    begun = time.perf_counter()
    manifest = prepare(model, config, target, clock)
    seconds, tokens = time.perf_counter() - begun, int(manifest.summary["tokens_supervised"])
    assert manifest.summary["rows_answered"] == manifest.summary["rows"], "some answers were there already"
    print(f"  {manifest.summary['backend']}: {clock.stored_at - begun:.1f} s, with states {seconds:.1f} s", flush=True)
    return (clock.stored_at - begun, tokens), (seconds, tokens)


@torch.inference_mode()
def plain_generate(model_path: Path, prompts: list[list[int]], config: DataConfig) -> Timed:
    """Transformers as it comes: load it, sort by length, `generate` batch by batch."""
    begun = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").eval()
    ends = model.generation_config.eos_token_id
    answered = 0
    ordered = sorted(prompts, key=len, reverse=True)
    for place in range(0, len(ordered), config.batch_size):
        batch = ordered[place : place + config.batch_size]
        width = len(batch[0])
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=config.max_new_tokens, pad_token_id=0
        )
        for row in out[:, width:].tolist():
            answered += row.index(ends) + 1 if ends in row else len(row)
    return time.perf_counter() - begun, answered


def bench_serve(server: Server, model: Path, prompts: list[str], config: DataConfig) -> Timed:
    """vLLM's own benchmark client; what it says of itself, so that its start does not count."""
    data, result = (ROOT / "prompts.vllm.jsonl").absolute(), (ROOT / "vllm.json").absolute()
    result.unlink(missing_ok=True)
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    arguments = {
        "backend": "openai", "base-url": server.url, "endpoint": "/v1/completions", "model": server.model,
        "tokenizer": str(model.absolute()), "dataset-name": "custom", "dataset-path": str(data),
        "num-prompts": str(len(prompts)), "custom-output-len": str(config.max_new_tokens), "temperature": "0",
        "max-concurrency": str(config.concurrency), "result-dir": str(result.parent), "result-filename": result.name,
    }  # fmt: skip
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    flags = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--save-result"]
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run(
        [str(vllm_python().absolute()), "-c", _CLIENT, *words, *flags],
        check=True, capture_output=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    found = json.loads(result.read_bytes())
    assert found["completed"] == len(prompts), found
    return float(found["duration"]), int(found["total_output_tokens"])


def per_token(timed: Timed) -> float:
    """Milliseconds per answered token."""
    return 1000 * timed[0] / timed[1]


def compare(backend: str, bare: Timed, timed: tuple[Timed, Timed]) -> dict[str, Metric]:
    """A backend's answers, and those with states, against its bare engine."""
    print(f"  bare {backend}: {bare[0]:.1f} s, {bare[1]:,} tokens", flush=True)
    answers, states = timed
    peer = per_token(bare)
    return {
        f"{backend}_answers": metric(per_token(answers), "ms/token", peer=peer, goal=1.1),
        f"{backend}_answers_and_states": metric(per_token(states), "ms/token", peer=peer, goal=1.4),
    }


def run() -> dict[str, Metric]:
    ROOT.mkdir(parents=True, exist_ok=True)
    model = verifier()
    renderer = Renderer.of(model)
    asked = fitting(renderer, questions(int(os.environ.get("FASTMTP_BENCH_PROMPTS", "500"))))
    file = ROOT / "prompts.jsonl"
    write_atomic(file, "".join(json.dumps({"question": question}) + "\n" for question in asked).encode())
    prompts = [renderer.prompt_ids([{"role": "user", "content": question}]) for question in asked]
    config = config_for(file, backend="transformers")
    plain_generate(model, prompts[:_WARM], config)
    bare = plain_generate(model, prompts, config)
    found = compare("transformers", bare, ours(model, config))
    with serve(Launch(checkpoint=model, max_model_len=_LONGEST, dtype="auto"), ROOT / "vllm.log") as server:
        texts = [renderer.tokenizer.decode(ids) for ids in prompts]
        served = config_for(file, server=server.url)
        server.generate([Request(ids, 64) for ids in prompts[:_WARM]], served.sampling, _WARM)
        bare = bench_serve(server, model, texts, served)
        found |= compare("vllm", bare, ours(model, served))
    ways = {name: found[f"{name}_answers_and_states"]["ours"] for name in ("transformers", "vllm")}
    print(f"  faster here: {min(ways, key=lambda name: ways[name])}", flush=True)
    return found
