"""Our chunked cross-entropy, forward and backward, against torch's over full logits, at Qwen3-Next's vocabulary.

The limit is the two matrix products nobody can avoid: logits, and their gradient back through the output head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmtp.losses import chunked_cross_entropy
from tests.benchmarks.measure import Metric, median_seconds, metric, peak_megabytes

VOCABULARY, HIDDEN, TOKENS = 151_936, 512, 512


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    return states, torch.randn(VOCABULARY, HIDDEN), torch.randint(VOCABULARY, (TOKENS,))


def ours(states: Tensor, weight: Tensor, targets: Tensor) -> None:
    chunked_cross_entropy(states, weight, targets)[0].backward()


def naive(states: Tensor, weight: Tensor, targets: Tensor) -> None:
    F.cross_entropy(states @ weight.T, targets, reduction="sum").backward()


def products(states: Tensor, weight: Tensor, _targets: Tensor) -> None:
    with torch.no_grad():
        (states @ weight.T) @ weight


def run() -> dict[str, Metric]:
    made = inputs()
    seconds = median_seconds(
        {"ours": lambda: ours(*made), "torch": lambda: naive(*made), "products": lambda: products(*made)}, repeats=5
    )
    peaks = {
        name: peak_megabytes("tests.benchmarks.bench_losses", f"{name}(*module.inputs())") for name in ("ours", "naive")
    }
    return {
        "step_seconds": metric(seconds["ours"], "s", peer=seconds["torch"], limit=seconds["products"], goal=1.1),
        "over_the_two_products": metric(seconds["ours"], "s", limit=seconds["products"], goal=1.6),
        "peak_memory": metric(peaks["ours"], "MB", peer=peaks["naive"], goal=0.5),
    }
