"""What benchmarks share: medians of interleaved runs, peak memory of a fresh process, and the shape of a result."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypedDict


class Metric(TypedDict):
    """One line of `.bench/NAME.json`. `ratio` is ours over the peer, or over the limit where there is no peer."""

    ours: float
    peer: float | None
    limit: float | None
    unit: str
    ratio: float
    goal: float | None


def metric(
    ours: float, unit: str, *, peer: float | None = None, limit: float | None = None, goal: float | None = None
) -> Metric:
    """A result against a peer, a limit, or both; `goal` is the largest ratio that is good."""
    against = peer if peer is not None else limit
    assert against
    return Metric(ours=ours, peer=peer, limit=limit, unit=unit, ratio=ours / against, goal=goal)


def median_seconds(runs: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Median seconds of each, one warm-up first, in turns, so that a noisy moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, call in runs.items():
            begun = time.perf_counter()
            call()
            if repeat:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(found) for name, found in times.items()}


def peak_megabytes(module: str, call: str) -> float:
    """Growth of a fresh process's peak resident memory, in MB, while `module.call` runs; the import is not counted."""
    program = (
        "import importlib, json, pathlib, re\n"
        f"module = importlib.import_module({module!r})\n"
        # Not getrusage: its maximum survives exec, so a child would report its parent's.
        "status = pathlib.Path('/proc/self/status')\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', status.read_text())[1]) / 1024\n"
        "before = peak()\n"
        f"module.{call}\n"
        "print(json.dumps(peak() - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    return float(json.loads(done.stdout.splitlines()[-1]))
