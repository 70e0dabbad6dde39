"""One pass over packed rows: the recursion under its loss, or what the head would draft. What DDP and FSDP wrap.

The verifier's embedding and output head are held as they are: no parameters, so they get no gradient and no optimizer
sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastmtp.config import TrainConfig
from fastmtp.data.rows import PackedRows
from fastmtp.head import MTPHead, StepOutput
from fastmtp.losses import token_losses


def step_weights(num_steps: int, beta: float) -> list[float]:
    """alpha_k = beta^k / sum_j beta^j (FastMTP, arXiv 2509.18362)."""
    raw = [beta**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]


class Objective(nn.Module):
    """The head with the verifier's embedding [V, H] and output head [V, H] beside it."""

    def __init__(self, head: MTPHead, embedding: Tensor, output: Tensor, config: TrainConfig) -> None:
        super().__init__()
        self.head = head
        self.verifier = (embedding, output)  # in a tuple, which nn.Module leaves alone
        self.config = config
        self.weights = step_weights(config.num_steps, config.beta)
        if config.recompute:
            recompute_feed_forward(head)

    def forward(self, rows: PackedRows | None, totals: Sequence[float] | None = None) -> tuple[Tensor, Tensor]:
        """A pass over rows, or over none, for a process that has none left while others do.

        Args:
            totals: targets of each recursive step that count in the whole optimizer step; each step's loss is the mean
                over those. None: no loss, but which drafts hit, by the serving recursion, which is what is served.

        Returns:
            The loss (scalar, differentiable) and [4, K] fp64 sums per recursive step of losses, hits, targets and
            cross-entropies; or, without totals, an empty tensor and [N, K] bool, whether the draft of step k at t
            is x_{t+k+2}.
        """
        if totals is None:
            return self._drafts(rows)
        sums = torch.zeros(4, self.config.num_steps, dtype=torch.float64, device=self.verifier[1].device)
        outputs = list(self._supervised(rows))
        if rows is None or not outputs:
            return self._nothing(), sums
        steps = torch.cat([torch.full_like(output.origins, step) for step, output in outputs])
        origins = torch.cat([output.origins for _, output in outputs])
        scale = torch.tensor([weight / total for weight, total in zip(self.weights, totals, strict=True)])
        found = token_losses(
            torch.cat([output.states for _, output in outputs]),
            self.verifier[1],
            rows.input_ids[origins + steps + 2],
            mixture=self.config.mixture,
            teacher=rows.hidden_states[origins + steps + 1],
            scale=scale.to(origins.device)[steps],
        )
        losses = sum((share * found.each[kind] for kind, share in self.config.mixture.items()), torch.zeros(()))
        for row, values in enumerate((losses, found.hits, torch.ones_like(losses), found.each["ce"])):
            sums[row].index_add_(0, steps, values.double())
        return found.total, sums

    def _supervised(self, rows: PackedRows | None) -> Iterator[tuple[int, StepOutput]]:
        """Per recursive step, the origins whose target counts and the states there; steps without any are left out."""
        if rows is None:
            return
        counted = [rows.counted(step) for step in range(self.config.num_steps)]
        origins = torch.stack(counted).any(0)
        if not origins.any():
            return
        outputs = self.head(rows, self.verifier[0], self.config.num_steps, origins, self.config.recursion)
        for step, output in enumerate(outputs):
            kept = counted[step][output.origins]
            if kept.any():
                yield step, StepOutput(output.origins[kept], output.states[kept])

    def _drafts(self, rows: PackedRows | None) -> tuple[Tensor, Tensor]:
        """See `forward`. x_n, one beyond a row of n, is what the verifier itself would say there.

        vLLM verifies a whole draft also where the answer ends inside it, and counts what it accepts beyond the end.
        """
        if rows is None:
            return torch.empty(0), torch.empty(0, self.config.num_steps, dtype=torch.bool)
        embedding, output_head = self.verifier
        last = rows.remaining() == 0
        following = rows.input_ids.roll(-1)
        following[last] = (rows.hidden_states[last].to(output_head.dtype) @ output_head.T).argmax(-1)
        # Decoding lands on origins from the last prompt position on: where x_{t+1} is the assistant's.
        origins = torch.zeros_like(rows.loss_mask)
        origins[:-1] = rows.loss_mask[1:]
        origins &= rows.remaining() >= 2
        hits = torch.zeros(len(rows.input_ids), self.config.num_steps, dtype=torch.bool, device=origins.device)
        for step, output in enumerate(self.head(rows, embedding, self.config.num_steps, origins)):
            found = token_losses(output.states, output_head, following[output.origins + step + 1])
            hits[output.origins, step] = found.hits
        return torch.empty(0), hits

    def _nothing(self) -> Tensor:
        """A loss of zero that reaches every parameter, so that this process takes part in the sum of gradients."""
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum() * 0.0


def recompute_feed_forward(head: MTPHead) -> None:
    """Let the layer's feed-forward part, most of what a pass keeps for its gradient, be computed twice instead.

    Attention is not: it keeps keys from step to step.
    """
    feed_forward = cast(nn.Module, head.layers[0].mlp)
    once = feed_forward.forward

    def forward(states: Tensor) -> object:
        return checkpoint(once, states, use_reentrant=False, preserve_rng_state=False)

    feed_forward.forward = forward
