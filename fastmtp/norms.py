"""Do the head's norms follow the family's convention? Some tools store gains (about 1) where offsets from 1 belong.

A head whose norms are read the wrong way drafts nothing that is accepted, and nothing else says so. This reads the
norms' few kilobytes; it loads no torch.
"""

from __future__ import annotations

import numpy as np

from fastmtp.checkpoint import Checkpoint, Fault
from fastmtp.native import HeadInfo

# Trained offsets from 1 lie around 0, trained gains around 1; between them neither reading is certain.
_HALF = 0.5


def check_norms(checkpoint: Checkpoint, head: HeadInfo) -> list[Fault]:
    """A warning when every norm of the head looks as if it were stored the other way."""
    means = {key: _mean(checkpoint, head, key) for key in head.tensors if key.endswith("norm.weight")}
    expected = 0.0 if head.family.norm == "1 + w" else 1.0
    wrong = sorted(key for key, mean in means.items() if not abs(mean - expected) <= _HALF)
    where = checkpoint.files.name
    if means and len(wrong) == len(means):
        found = f"between {min(means.values()):.2f} and {max(means.values()):.2f}"
        what = f"{where}: the means of the head's norms lie {found}; {head.family.title} stores weights around "
        what += f"{expected:.0f} (gain = {head.family.norm}). The head was probably converted for another convention."
        return [Fault("warning", "norm_convention", what, "Take the original checkpoint.")]
    return []


def _mean(checkpoint: Checkpoint, head: HeadInfo, key: str) -> float:
    entry = head.tensors[key]
    with np.errstate(invalid="ignore"):
        return float(floats(checkpoint.read(entry), entry.dtype).mean())


def floats(data: bytes, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Little-endian BF16, F16 or F32 bytes as numbers."""
    if dtype == "BF16":
        # A bf16 number is the upper half of an fp32 number.
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float64)
