"""`fastmtp inspect` against a second: a checkpoint of Qwen3-Next-80B's own sizes, 163 GB in 41 shards, sparse on disk.

The files have true headers (75,000 tensors, 10 MB of JSON) and holes where the weights would be. Seconds are of the
whole command, start of the interpreter included; the headers are in the page cache. Bytes read are what system calls
returned, less those of the same command on a tiny checkpoint (modules, tokenizers of the terminal and the like).
"""

from __future__ import annotations

import json
import shutil
import statistics
import struct
import sys
from pathlib import Path

from fastmtp.checkpoint import CONFIG, INDEX
from tests.benchmarks.child import Usage, bare_peak
from tests.benchmarks.child import run as run_child
from tests.benchmarks.measure import Metric, metric
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import large_config

ROOT = Path(".bench/inspect")
ROUNDS = 7
LAYERS, EXPERTS, SHARDS = 48, 512, 41
PEAK_LIMIT = 300.0  # MB
_MEGA = 1e6


def run() -> dict[str, Metric]:
    """The large checkpoint and a tiny one, in turns; takes 15 MB of disk."""
    shutil.rmtree(ROOT, ignore_errors=True)
    try:
        config = large_config(layers=LAYERS, num_experts=EXPERTS, vocab_size=151936)
        large = write(ROOT / "large", family="qwen3-next", config=config, plan=Plan(shards=SHARDS), sparse=True)
        tiny = write(ROOT / "tiny", family="qwen3-next")
        runs: dict[Path, list[Usage]] = {large: [], tiny: []}
        for number in range(ROUNDS + 1):
            for root, found in runs.items():
                usage = run_child([sys.executable, "-m", "fastmtp", "inspect", root, "--json"])
                if number:
                    found.append(usage)
        _require_whole(json.loads(runs[large][0].stdout))
        needed = sum(_header_bytes(path) for path in large.glob("*.safetensors"))
        needed += sum((large / name).stat().st_size for name in (CONFIG, INDEX))
    finally:
        shutil.rmtree(ROOT, ignore_errors=True)
    seconds = {root: statistics.median(usage.seconds for usage in found) for root, found in runs.items()}
    read = {root: statistics.median(usage.read for usage in found) for root, found in runs.items()}
    peak = max(usage.peak for usage in runs[large]) - bare_peak(Path(sys.executable))
    return {
        "time, 163 GB": metric(seconds[large], "s", limit=1.0, goal=1.0),
        "time, a tiny checkpoint": metric(seconds[tiny], "s", limit=1.0),
        "read against config, index and headers": metric(
            (read[large] - read[tiny]) / _MEGA, "MB", limit=needed / _MEGA, goal=1.05
        ),
        "peak memory": metric(peak / _MEGA, "MB", limit=PEAK_LIMIT, goal=1.0),
    }


def _require_whole(found: dict[str, object]) -> None:
    """Raise RuntimeError unless `inspect` found what was written."""
    head = found["head"]
    wanted = 3 * EXPERTS + 4 + 2 + 6 + 5  # experts, around the layer, its norms, attention, router and shared expert
    if found["family"] != "qwen3-next" or not isinstance(head, dict) or head["tensors"] != wanted:
        raise RuntimeError(f"inspect did not find the head of {wanted} tensors: {found}")


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int(struct.unpack("<Q", file.read(8))[0])
