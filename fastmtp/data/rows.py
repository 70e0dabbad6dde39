"""Rows packed end to end: how a batch reaches the head, without padding and without attention from row to row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """R conversations laid end to end, N tokens in all.

    Attributes:
        input_ids: [N] int64.
        hidden_states: [N, H], the verifier's states after its final norm, at the same positions.
        loss_mask: [N] bool, true where the token is the assistant's own.
        lengths: tokens per row; they add up to N.
    """

    input_ids: Tensor
    hidden_states: Tensor
    loss_mask: Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        tokens = sum(self.lengths)
        assert len(self.input_ids) == len(self.hidden_states) == len(self.loss_mask) == tokens

    @classmethod
    def pack(cls, rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> PackedRows:
        """Lay rows of (input_ids [n], hidden_states [n, H], loss_mask [n]) end to end."""
        ids, hidden, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return cls(ids, hidden, mask, tuple(len(row[0]) for row in rows))

    def to(self, device: torch.device, dtype: torch.dtype) -> PackedRows:
        """On a device, with the hidden states in a compute type."""
        return PackedRows(
            self.input_ids.to(device), self.hidden_states.to(device, dtype), self.loss_mask.to(device), self.lengths
        )

    def row_of(self) -> Tensor:
        """[N] int64: the row each token belongs to."""
        counts = torch.tensor(self.lengths, device=self.input_ids.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=counts.device), counts)

    def positions(self) -> Tensor:
        """[N] int64: place of each token in its row, from 0."""
        return torch.cat([torch.arange(length, device=self.input_ids.device) for length in self.lengths])

    def remaining(self) -> Tensor:
        """[N] int64: how many tokens of the same row follow each token."""
        return torch.cat([torch.arange(length - 1, -1, -1, device=self.input_ids.device) for length in self.lengths])

    def counted(self, step: int) -> Tensor:
        """[N] bool: origins t whose step-`step` target x_{t+step+2} exists in the row and is the assistant's own."""
        reach = step + 2
        target = torch.zeros_like(self.loss_mask)
        target[:-reach] = self.loss_mask[reach:]
        return target & (self.remaining() >= reach)
