"""Our tiled losses, forward and backward, against torch's over full logits, at Qwen3-Next's vocabulary.

The limit is the matrix products nobody can avoid: logits, and their gradient back through the output head; for kl and
tv the verifier's logits too.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmtp.losses import token_losses
from tests.benchmarks.measure import Metric, median_seconds, metric, peak_megabytes

VOCABULARY, HIDDEN, TOKENS = 151_936, 512, 512
KINDS = ("ce", "kl", "tv")


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.05)
    return states, weight, torch.randint(VOCABULARY, (TOKENS,)), torch.randn(TOKENS, HIDDEN)


def ours(kind: str, states: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor) -> None:
    token_losses(states, weight, targets, mixture={kind: 1.0}, teacher=teacher).total.backward()


def naive(kind: str, states: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor) -> None:
    logits = states @ weight.T
    if kind == "ce":
        F.cross_entropy(logits, targets, reduction="sum").backward()
        return
    with torch.no_grad():
        wanted = (teacher @ weight.T).log_softmax(-1)
    p = logits.log_softmax(-1)
    loss = (
        F.kl_div(p, wanted, log_target=True, reduction="sum") if kind == "kl" else (p.exp() - wanted.exp()).abs().sum()
    )
    loss.backward()


def products(kind: str, states: Tensor, weight: Tensor, _targets: Tensor, teacher: Tensor) -> None:
    with torch.no_grad():
        (states @ weight.T) @ weight
        if kind != "ce":
            teacher @ weight.T


def run() -> dict[str, Metric]:
    made, found = inputs(), {}
    for kind in KINDS:
        calls = {call.__name__: partial(call, kind, *made) for call in (ours, naive, products)}
        seconds = median_seconds(calls, repeats=3)
        peaks = {
            name: peak_megabytes("tests.benchmarks.bench_losses", f"{name}({kind!r}, *module.inputs())")
            for name in ("ours", "naive")
        }
        found |= {
            f"{kind}_seconds": metric(seconds["ours"], "s", peer=seconds["naive"], goal=1.0),
            f"{kind}_over_the_products": metric(seconds["ours"], "s", limit=seconds["products"], goal=1.5),
            f"{kind}_peak_memory": metric(peaks["ours"], "MB", peer=peaks["naive"], goal=0.5),
        }
    return found
