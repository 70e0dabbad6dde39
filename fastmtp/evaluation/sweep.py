"""Which K serves a head best: acceptance grows with K, and so does what a step costs.

Where speed is measured, the K with the most output tokens per second while the sweep's own prompts were answered. Else
by a model of cost: decoding waits for weights to be read, so a step takes the time of the bytes it reads. The verifier
reads its layers and output head once, each of the K draft tokens reads the head's layer and the output head once more:

    speed(K) ~ L(K) / (1 + K c),   c = (head + output head) / (layers + output head), in bytes

with L(K) the mean acceptance length. It leaves out attention's caches and everything that does not grow with weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastmtp.checkpoint import Checkpoint
from fastmtp.evaluation.report import Acceptance, Sweep
from fastmtp.native import find_head


def draft_cost(checkpoint: Checkpoint) -> float:
    """c: what one draft token costs, the verifier's own pass being 1.

    Of experts the verifier and the head read the same share, so that counting all of them leaves the ratio nearly as
    it is.
    """
    head = find_head(checkpoint)
    of_head = {entry.key for entry in head.tensors.values()}
    sizes = {key: entry.nbytes for key, entry in checkpoint.tensors.items() if key not in of_head}
    embeddings = sum(size for key, size in sizes.items() if key.endswith("embed_tokens.weight"))
    outputs = sum(size for key, size in sizes.items() if key.endswith("lm_head.weight"))
    # Of the embedding a pass reads a row per token; where it is the output head too, all of it.
    output = outputs or embeddings
    layers = sum(sizes.values()) - embeddings - outputs
    return (head.nbytes + output) / max(layers + output, 1)


def sweep(figures: Sequence[Acceptance], cost: float, *, measured: bool) -> Sweep:
    """The best K of one head, set and temperature.

    Args:
        figures: one for each K.
        cost: of a draft token, from `draft_cost`.
        measured: go by tokens per second as they were measured.
    """
    ordered = sorted(figures, key=lambda one: one.num_speculative_tokens)

    def speed(one: Acceptance) -> float:
        if measured:
            return one.answer_tokens / max(one.seconds, 1e-9)
        return one.mean_acceptance_length.value / (1.0 + one.num_speculative_tokens * cost)

    best = max(ordered, key=speed)
    parts = ", ".join(f"{one.num_speculative_tokens}: {speed(one):.{0 if measured else 3}f}" for one in ordered)
    reason = (
        f"most output tokens per second with {best.concurrency} requests in flight ({parts})"
        if measured
        else f"most tokens per byte of weights read, a draft token costing {cost:.3f} of a verification ({parts})"
    )
    return Sweep(
        head=best.head, set=best.set, temperature=best.temperature, best=best.num_speculative_tokens, reason=reason,
        lengths={one.num_speculative_tokens: one.mean_acceptance_length.value for one in ordered},
    )  # fmt: skip
