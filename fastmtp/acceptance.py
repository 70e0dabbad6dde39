"""From hits to acceptance, the way vLLM counts: over the places where decoding lands, not over every position.

rate_i = accepted at position i / drafts (cumulative, so non-increasing in i); mean acceptance length = 1 + sum of the
rates. Source of the definition: vLLM 0.32, `v1/spec_decode/metrics.py`. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastmtp.protocol import Measurement


class Walk:
    """Counts drafts and accepted tokens of simulated speculative decoding over verified answers.

    Args:
        num_steps: draft tokens per step, K.
    """

    def __init__(self, num_steps: int) -> None:
        self.drafts = 0
        self.accepted = [0] * num_steps

    def add(self, hits: Sequence[Sequence[bool]], first: int, length: int) -> None:
        """Walk one row.

        Args:
            hits: hits[t][k] says whether the draft of step k at origin t is the token x_{t+k+2}. vLLM verifies a draft
                to its end also where the answer ends inside it, so x_length, one beyond the row, counts where it is
                known; false farther out.
            first: the last prompt position, where the first draft is made.
            length: tokens of the row; decoding ends when the last one is known.
        """
        origin = first
        while origin + 2 < length:
            run = 0
            while run < len(self.accepted) and hits[origin][run]:
                self.accepted[run] += 1
                run += 1
            self.drafts += 1
            origin += run + 1

    def measurement(self) -> Measurement:
        """The figures so far."""
        return measurement(self.drafts, self.accepted)


def measurement(drafts: int, accepted: Sequence[int]) -> Measurement:
    """Rates and mean acceptance length from counts; zeros when nothing was drafted."""
    rates = [count / drafts if drafts else 0.0 for count in accepted]
    return Measurement(acceptance=rates, mean_acceptance_length=1.0 + sum(rates), drafts=drafts)
