"""A training step, forward and backward, against speculators' and against the two matrix products that it needs.

One row, its second half supervised, K=3, a Qwen3-Next layer with 8 experts, H=512, fp32 on the CPU. The full size is
T=2048 tokens and V=151,936; a smaller T and a smaller V show that cost grows with both and no faster, and a long row
with a small vocabulary that memory does not grow with T squared. Ours and the products are timed in turns; the peer
takes one step per size in its own interpreter, after a short one: five to ten minutes in all. Memory is what a fresh
process grows by at its peak, embedding and output head included.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial

from tests.benchmarks.measure import Metric, median_seconds, metric, peak_megabytes
from tests.benchmarks.peer import speculators_python
from tests.benchmarks.steps import Sizes, make, products, train_step

FULL = Sizes(2048, 151_936)
SIZES = (FULL, Sizes(1024, 151_936), Sizes(2048, 37_984))
LONG = (Sizes(4096, 1024), Sizes(8192, 1024))


def ours(tokens: int, vocabulary: int) -> None:
    train_step(make(Sizes(tokens, vocabulary)))


def peak(sizes: Sizes) -> float:
    return peak_megabytes("tests.benchmarks.bench_train_step", f"ours({sizes.tokens}, {sizes.vocabulary})")


def speculators(sizes: Sizes) -> dict[str, float]:
    """`seconds` and `megabytes` of the peer's step."""
    argument = json.dumps({"layer": sizes.layer(), "sizes": sizes.asdict()})
    command = [str(speculators_python()), "tests/benchmarks/peer_train_step.py", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run() -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    seconds: dict[Sizes, float] = {}
    for sizes in SIZES:
        made = make(sizes)
        calls = {"ours": partial(train_step, made), "products": partial(products, made)}
        times = median_seconds(calls, repeats=3)
        del made, calls
        name = f"T{sizes.tokens}_V{sizes.vocabulary}"
        print(f"  {name}: ours {times['ours']:.1f} s, products {times['products']:.1f} s; now the peer", flush=True)
        peer = speculators(sizes)
        seconds[sizes] = times["ours"]
        full = sizes == FULL
        found |= {
            f"{name}_seconds": metric(times["ours"], "s", peer=peer["seconds"], goal=0.25 if full else None),
            f"{name}_memory": metric(peak(sizes), "MB", peer=peer["megabytes"], goal=1 / 6 if full else None),
            f"{name}_over_the_products": metric(
                times["ours"], "s", limit=times["products"], goal=1.5 if full else None
            ),
        }
    _, half, quarter = SIZES
    shorter, longer = map(peak, LONG)
    return found | {
        "seconds_against_twice_half_T": metric(seconds[FULL], "s", limit=2 * seconds[half], goal=1.15),
        "seconds_against_4_times_quarter_V": metric(seconds[FULL], "s", limit=4 * seconds[quarter], goal=1.15),
        "memory_T8192_against_twice_T4096": metric(longer, "MB", limit=2 * shorter, goal=1.1),
    }
