"""What stops a run because going on would waste it: a head that was mis-read, a loss that is no number, a tensor that
did not move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fastmtp.errors import TrainingError

SAMPLE_ROWS = 20
CEILING = 0.9  # of what a guess by frequency costs


def guess_cost(train: Iterable[int], targets: Sequence[int], vocabulary: int) -> float:
    """Mean cross-entropy (nats) on `targets` of a guess that knows the frequencies in `train` and nothing else.

    One is added to each count, so from few tokens it knows little and costs about log V, which is also its ceiling.
    """
    counts = Counter(train)
    seen = sum(counts.values()) + vocabulary
    cost = sum(math.log(seen / (counts[token] + 1)) for token in targets) / len(targets)
    return min(cost, math.log(vocabulary))


def require_well_read(loss: float, guess: float, hit: float) -> None:
    """Stop when the untouched head predicts about as badly as a guess by frequency: no native head does, if its
    tensors, norms and the order of its two inputs are read as they were trained.

    Args:
        loss: of step 0 on real rows, in nats.
        guess: see `guess_cost`.
        hit: share of targets that step 0 drafts.
    """
    if loss < CEILING * guess:
        return
    raise TrainingError(
        f"The head as it came costs {loss:.2f} nats a token and drafts {hit:.1%} of them, where a guess by frequency"
        f" costs {guess:.2f}: it was mis-read, or was never trained.",
        mend="Check with `fastmtp inspect` that model and head belong together and that no tool re-wrote the norms."
        " For a head that is to be trained from nothing, set train.allow_untrained_head.",
    )


def require_finite(loss: float, norm: float, step: int, learning_rate: float) -> None:
    """Stop before a gradient that is no number is applied. `step` counts from 1."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    mend = "The head or its rows hold such values: check them." if step == 1 else "Lower train.lr, or warm up longer."
    raise TrainingError(
        f"At step {step}, with rate {learning_rate:.3g}, the loss is {loss} and its gradient's norm {norm}.", mend=mend
    )


def require_moved(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], trained: Iterable[str]
) -> dict[str, float]:
    """Stop when a trained tensor is what it was: it was not connected, or its steps were rounded away.

    Returns:
        How many tensors there are, how many moved, and by how much the weight that moved most.
    """
    names = list(trained)
    changes = {name: float((after[name].float() - before[name].float()).abs().max()) for name in names}
    still = [name for name, change in changes.items() if change == 0.0]
    if still:
        raise TrainingError(
            f"{len(still)} of {len(names)} tensors did not move in training, {still[0]} first.",
            mend="Raise train.lr, or take more steps.",
        )
    return {"tensors": len(names), "tensors_moved": len(changes), "max_change": max(changes.values())}


def count_changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> int:
    """How many stored tensors differ."""
    return sum(not torch.equal(value, after[key]) for key, value in before.items())
