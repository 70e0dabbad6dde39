"""Output tokens per second and latency under vLLM's own bench client: without speculation, and with either head.

All arms answer the same prompts (token ids) at the same concurrencies, in turn, round after round, so that what the
machine does besides falls on all alike; medians over the rounds count, and a speed-up is a ratio within one round. The
client measures from outside: time to the first piece of an answer, and between pieces, which with speculation hold
several tokens.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from fastmtp import procs
from fastmtp.config import SpeedConfig
from fastmtp.errors import ServingError
from fastmtp.evaluation.report import Arm, Estimate, SpeedFigure, SpeedReport, SpeedRun, SpeedUp
from fastmtp.progress import Reporter
from fastmtp.serving import Server, vllm_python

# The client as `vllm bench serve` runs it, whose command does not start from the CPU wheel; several measurements by one
# process, since loading it takes ten seconds. Runs in vLLM's environment.
_CLIENT = """
import argparse, json, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
for words in json.load(open(sys.argv[1])):
    main(parser.parse_args(words))
"""
_WARM = 2
_FIGURES = (
    "output_tokens_per_second", "itl_median_ms", "itl_p95_ms", "ttft_median_ms", "ttft_p95_ms", "tpot_median_ms",
)  # fmt: skip

Arms = Mapping[Arm, Callable[[], AbstractContextManager[Server]]]


def measure_speed(
    arms: Arms,
    name: str,
    prompts: Sequence[Sequence[int]],
    config: SpeedConfig,
    *,
    max_tokens: int,
    temperature: float,
    num_speculative_tokens: int,
    together: bool,
    directory: Path,
    reporter: Reporter,
) -> SpeedReport:
    """Measure all arms.

    Args:
        arms: who starts each server: `none` without speculation, `base`, `tuned`.
        name: of the prompt set.
        prompts: token ids; asked again from the first where there are fewer than are wanted.
        together: all servers at once, one asked at a time, which small models allow; otherwise each is started for
            itself in every round.
        directory: of logs, and of what the client reads and writes.

    Raises:
        ServingError: a server or the client failed.
    """
    begun = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    asked = [prompts[place % len(prompts)] for place in range(config.num_prompts)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": list(ids)}) + "\n" for ids in asked))
    client = _Client(directory, config, max_tokens, temperature)
    reporter.phase("speed", config.rounds * len(config.concurrencies) * len(arms), "measurements")
    runs: list[SpeedRun] = []
    for batch in _batches(arms, config, together):
        with batch as wanted:
            runs += client.run(wanted)
        reporter.advance(len(runs), note=_note(runs))
    return SpeedReport(
        set=name, prompts=len(asked), max_tokens=max_tokens, temperature=temperature,
        num_speculative_tokens=num_speculative_tokens, rounds=config.rounds,
        mode="together" if together else "in turn", client=client.shown, figures=figures(runs), speedups=speedups(runs),
        runs=runs, seconds=time.monotonic() - begun,
    )  # fmt: skip


# What is to be measured while the servers of a batch run: arm, server, concurrency, round.
Wanted = list[tuple[Arm, Server, int, int]]


def _batches(arms: Arms, config: SpeedConfig, together: bool) -> Iterator[AbstractContextManager[Wanted]]:
    if together:
        yield _all_at_once(arms, config)
        return
    for number in range(config.rounds):
        for arm in _turned(list(arms), number):
            yield _alone(arm, arms[arm], config, number)


@contextlib.contextmanager
def _all_at_once(arms: Arms, config: SpeedConfig) -> Iterator[Wanted]:
    with contextlib.ExitStack() as stack:
        servers = {arm: stack.enter_context(start()) for arm, start in arms.items()}
        yield [
            (arm, servers[arm], concurrency, number)
            for number in range(config.rounds)
            for concurrency in config.concurrencies
            for arm in _turned(list(arms), number)
        ]


@contextlib.contextmanager
def _alone(
    arm: Arm, start: Callable[[], AbstractContextManager[Server]], config: SpeedConfig, number: int
) -> Iterator[Wanted]:
    with start() as server:
        yield [(arm, server, concurrency, number) for concurrency in config.concurrencies]


def _turned(arms: list[Arm], number: int) -> list[Arm]:
    """Another one begins each round: who comes after whom may matter."""
    place = number % len(arms)
    return arms[place:] + arms[:place]


class _Client:
    """vLLM's bench client. `shown` is the command line of the last measurement, for people."""

    def __init__(self, directory: Path, config: SpeedConfig, max_tokens: int, temperature: float) -> None:
        self._directory, self._config = directory, config
        self._body = {"max_tokens": max_tokens, "temperature": temperature, "add_special_tokens": False}
        self.shown: list[str] = []

    def run(self, wanted: Wanted) -> list[SpeedRun]:
        """Take these measurements, one after the other."""
        plan = [self._words(arm, server, concurrency, number) for arm, server, concurrency, number in wanted]
        (self._directory / "plan.json").write_text(json.dumps(plan))
        self.shown = ["vllm", "bench", "serve", *plan[-1]]
        log = self._directory / "client.log"
        status = procs.run([str(vllm_python()), "-c", _CLIENT, str(self._directory / "plan.json")], log=log)
        if status != 0:
            raise ServingError(
                f"vLLM's bench client failed (status {status}) in: {shlex.join(self.shown[:6])} ...;"
                f" last lines of {log}:\n{procs.tail(log)}"
            )
        return [self._read(arm, concurrency, number) for arm, _, concurrency, number in wanted]

    def _words(self, arm: Arm, server: Server, concurrency: int, number: int) -> list[str]:
        # Without a tokenizer prompts go as they are, as token ids; how long answers may be then stands in the body, and
        # latencies are left to us, from what it saw of each request.
        body = self._body | ({"seed": 0} if server.seeds else {})
        return [
            "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", server.model,
            "--skip-tokenizer-init", "--dataset-name", "custom", "--dataset-path",
            str(self._directory / "prompts.jsonl"), "--disable-shuffle", "--num-prompts", str(self._config.num_prompts),
            "--max-concurrency", str(concurrency), "--num-warmups", str(_WARM), "--disable-tqdm",
            "--extra-body", json.dumps(body), "--save-result", "--save-detailed", "--result-dir",
            str(self._directory), "--result-filename", _result(arm, concurrency, number),
        ]  # fmt: skip

    def _read(self, arm: Arm, concurrency: int, number: int) -> SpeedRun:
        found: dict[str, Any] = json.loads((self._directory / _result(arm, concurrency, number)).read_bytes())
        if found["completed"] != self._config.num_prompts:
            raise ServingError(
                f"vLLM answered {found['completed']} of {self._config.num_prompts} requests of the speed measurement;"
                f" see {self._directory}."
            )
        return SpeedRun(
            arm=arm, concurrency=concurrency, round=number, output_tokens=found["total_output_tokens"],
            seconds=found["duration"], output_tokens_per_second=found["output_throughput"], **latencies(found),
        )  # fmt: skip


def latencies(found: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds, from the seconds that the client saw of each request: first piece, later pieces, all of it."""
    between = [gap for gaps in found["itls"] for gap in gaps]
    requests = zip(found["latencies"], found["ttfts"], found["output_lens"], strict=True)
    each = [(whole - first) / (tokens - 1) for whole, first, tokens in requests if tokens > 1]
    medians = {"itl_median_ms": between, "ttft_median_ms": found["ttfts"], "tpot_median_ms": each}
    tails = {"itl_p95_ms": between, "ttft_p95_ms": found["ttfts"]}
    shown = {name: float(np.median(values or [0.0])) for name, values in medians.items()}
    shown |= {name: float(np.percentile(values or [0.0], 95)) for name, values in tails.items()}
    return {name: 1000 * value for name, value in shown.items()}


def figures(runs: Sequence[SpeedRun]) -> list[SpeedFigure]:
    """Medians over the rounds, with the least and the greatest."""
    return [
        SpeedFigure.model_validate(
            {"arm": arm, "concurrency": concurrency}
            | {name: _spread([getattr(run, name) for run in found]) for name in _FIGURES}
        )
        for (arm, concurrency), found in _grouped(runs).items()
    ]


def speedups(runs: Sequence[SpeedRun]) -> list[SpeedUp]:
    """Of each head over no speculation, and of the tuned over the base, at each concurrency."""
    rates = {(run.arm, run.concurrency, run.round): run.output_tokens_per_second for run in runs}
    pairs: tuple[tuple[Arm, Arm], ...] = (("base", "none"), ("tuned", "none"), ("tuned", "base"))
    found = []
    for arm, over in pairs:
        for concurrency in sorted({run.concurrency for run in runs}):
            ratios = [
                rate / rates[over, at, number]
                for (whose, at, number), rate in rates.items()
                if whose == arm and at == concurrency and (over, at, number) in rates
            ]
            if ratios:
                found.append(SpeedUp(arm=arm, over=over, concurrency=concurrency, ratio=_spread(ratios)))
    return found


def _grouped(runs: Sequence[SpeedRun]) -> dict[tuple[Arm, int], list[SpeedRun]]:
    found: dict[tuple[Arm, int], list[SpeedRun]] = {}
    for run in sorted(runs, key=lambda run: (["none", "base", "tuned"].index(run.arm), run.concurrency)):
        found.setdefault((run.arm, run.concurrency), []).append(run)
    return found


def _spread(values: Sequence[float]) -> Estimate:
    return Estimate(value=statistics.median(values), low=min(values), high=max(values))


def _result(arm: Arm, concurrency: int, number: int) -> str:
    return f"{arm}-{concurrency}-{number}.json"


def _note(runs: Sequence[SpeedRun]) -> str:
    return f"{runs[-1].arm}: {runs[-1].output_tokens_per_second:.0f} tokens/s" if runs else ""
