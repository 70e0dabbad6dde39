"""The verifier's hidden states after its final norm, by one forward pass over rows that are there already.

Rows of like length go together, padded on the right, where nothing real looks. No logits are made. States that somebody
else computed are held against this pass on a few rows, since a mix-up of rows or norms shows nowhere else.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastmtp.data.engines.loading import Verifier
from fastmtp.errors import DataError
from fastmtp.table import size

# Root mean square of the difference over that of the states. Two passes in bf16 that sum in other orders differ by
# less than 0.01; states of another row, or from before the norm, by about 1.
TOLERANCE = 0.05
_IDS_BYTES = 5  # int32 id and one byte of mask


@torch.inference_mode()
def forward_states(
    verifier: Verifier, rows: Sequence[Sequence[int]], tokens: int, on_done: Callable[[int], None] | None = None
) -> list[Tensor]:
    """States [n, H] in the model's dtype, on the CPU, of each row of token ids, in the order of the rows.

    Args:
        tokens: most tokens of one pass, padding included; a longer row goes alone.
        on_done: hears how many tokens each pass has done.
    """
    found: dict[int, Tensor] = {}
    for places in batches([len(row) for row in rows], tokens):
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[place]) for place in places], batch_first=True)
        # The base model's last state is after the final norm.
        hidden: Tensor = verifier.model.base_model(
            input_ids=padded.to(verifier.device), use_cache=False
        ).last_hidden_state.cpu()
        for line, place in enumerate(places):
            # A copy of its own: a view would keep the padding of all the batch in memory.
            found[place] = hidden[line, : len(rows[place])].clone()
        if on_done:
            on_done(sum(len(rows[place]) for place in places))
    return [found[place] for place in range(len(rows))]


def batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Places of rows of like length, at most `tokens` a batch when padded to its longest; the longest batch first."""
    made: list[list[int]] = []
    longest = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not made or longest * (len(made[-1]) + 1) > tokens:
            made.append([])
            longest = lengths[place]
        made[-1].append(place)
    return made


def disagreement(found: Tensor, fresh: Tensor) -> float:
    """Root mean square of the difference of two [n, H], over that of the second."""
    difference = (found.float() - fresh.float()).square().mean().sqrt()
    return float(difference / fresh.float().square().mean().sqrt().clamp(min=1e-12))


def require_agreement(found: Mapping[int, Tensor], verifier: Verifier, rows: Sequence[Sequence[int]], who: str) -> None:
    """Raise DataError where the states that `who` gave for some rows (by place) are not those of a forward pass."""
    for place, states in found.items():
        fresh = forward_states(verifier, [rows[place]], len(rows[place]))[0]
        if states.shape != fresh.shape or not disagreement(states, fresh) <= TOLERANCE:
            off = disagreement(states, fresh) if states.shape == fresh.shape else float("inf")
            raise DataError(
                f"The hidden states that {who} gave for row {place} are not those of the verifier after its final norm:"
                f" they differ by {off:.2f} of their size, where {TOLERANCE} is rounding.",
                mend="Use data.states_from: transformers.", pointer="/data/states_from",
            )  # fmt: skip


def states_bytes(tokens: int, hidden_size: int) -> int:
    """Bytes on disk of that many tokens: bf16 states, ids and mask."""
    return tokens * (hidden_size * 2 + _IDS_BYTES)


def require_room(place: Path, tokens: int, hidden_size: int) -> None:
    """Raise DataError when states of that many tokens do not fit onto the disk."""
    needed, free = states_bytes(tokens, hidden_size), shutil.disk_usage(place).free
    if needed > free:
        raise DataError(
            f"The hidden states of {tokens:,} tokens need {size(needed)} (tokens x hidden size x 2 bytes);"
            f" {place} has {size(free)} free.",
            mend="Lower data.max_samples, use another disk, or take data.hidden_states: online.",
            pointer="/data/hidden_states",
        )
