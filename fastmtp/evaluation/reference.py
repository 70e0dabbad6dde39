"""The cross-check without vLLM: what the walk makes of a head over answers that are known, beside vLLM's own counters.

One forward pass of the verifier over prompt and answer gives the states; from these each head's drafts at every
position are compared with the answer, and `fastmtp.acceptance` walks them as decoding would. Greedy answers only: at
another temperature what is accepted depends on chance. Nothing of a draft depends on how long drafts are, so one pass
serves every K.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fastmtp.acceptance import Walk
from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import TrainConfig
from fastmtp.data.engines.loading import load_verifier
from fastmtp.data.packing import pack
from fastmtp.data.rows import PackedRows
from fastmtp.data.states import forward_states
from fastmtp.evaluation.report import Head, Reference, ReferenceWalk
from fastmtp.extract import extract
from fastmtp.progress import Reporter
from fastmtp.protocol import Measurement
from fastmtp.training.headfiles import HeadFiles
from fastmtp.training.objective import Objective
from fastmtp.training.world import pick_device

TOLERANCE = 0.02
DEPTH = 5  # drafts of up to this length are walked, whatever vLLM ran with
_PASS_TOKENS = 8192

# Token ids of a prompt and of the answer to it.
Answered = tuple[Sequence[int], Sequence[int]]
Lengths = dict[int, Measurement]


def reference(
    verifier: Path,
    heads: Mapping[Head, Path],
    answers: Mapping[tuple[Head, str], Sequence[Answered]],
    counted: Mapping[tuple[Head, str], Measurement],
    num_speculative_tokens: int,
    reporter: Reporter,
    *,
    offload: bool | Literal["auto"] = "auto",
) -> Reference:
    """Walk the greedy answers of each head and set, and hold the figures against vLLM's.

    Args:
        verifier: checkpoint whose backbone gives the states.
        heads: checkpoints with the heads.
        answers: by head and set.
        counted: what vLLM counted over these answers, where it did.
        num_speculative_tokens: K of `counted`.
    """
    begun = time.monotonic()
    depth = max(DEPTH, num_speculative_tokens)
    rows = sorted({(tuple(prompt), tuple(answer)) for found in answers.values() for prompt, answer in found})
    reporter.phase("reference: the verifier's hidden states", sum(len(p) + len(a) for p, a in rows), "tokens")
    states = dict(zip(rows, _states(verifier, rows, reporter, offload), strict=True))
    walks = []
    for head, checkpoint in heads.items():
        found = {name: rows_of for (whose, name), rows_of in answers.items() if whose == head}
        if not found:
            continue
        reporter.phase(f"reference: {head} drafts", sum(map(len, found.values())), "answers")
        objective = _objective(checkpoint, depth)
        for name, rows_of in found.items():
            lengths = walk_rows(
                objective, [(prompt, answer, states[prompt, answer]) for prompt, answer in _keys(rows_of)]
            )
            walks.append(
                _compared(head, name, lengths, counted.get((head, name)), num_speculative_tokens)
            )  # fmt: skip
    return Reference(tolerance=TOLERANCE, walks=walks, seconds=time.monotonic() - begun)


@torch.inference_mode()
def walk_rows(
    objective: Objective, rows: Sequence[tuple[Sequence[int], Sequence[int], Tensor]], tokens: int = _PASS_TOKENS
) -> Lengths:
    """K -> figures of the walk, for every K up to the objective's steps.

    Args:
        rows: prompt ids, answer ids, and states [n, H] of both together.
        tokens: of one pass of the head.
    """
    walks = {steps: Walk(steps) for steps in range(1, objective.config.num_steps + 1)}
    device = objective.verifier[1].device
    lengths = [len(prompt) + len(answer) for prompt, answer, _ in rows]
    for group in pack(lengths, tokens):
        packed = PackedRows.pack([_row(*rows[place]) for place in group]).to(device, torch.float32)
        _, hits = objective(packed)
        for place, found in zip(group, hits.cpu().split([lengths[place] for place in group]), strict=True):
            listed, begin = found.tolist(), len(rows[place][0])
            for walk in walks.values():
                walk.add(listed, begin - 1, lengths[place])
    return {steps: walk.measurement() for steps, walk in walks.items()}


def _row(prompt: Sequence[int], answer: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor([*prompt, *answer])
    return ids, states, torch.arange(len(ids)) >= len(prompt)


def _keys(rows: Sequence[Answered]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(prompt), tuple(answer)) for prompt, answer in rows]


def _states(
    verifier: Path,
    rows: Sequence[Answered],
    reporter: Reporter,
    offload: bool | Literal["auto"],
) -> list[Tensor]:
    done = 0

    def on_done(count: int) -> None:
        nonlocal done
        done += count
        reporter.advance(done)

    with tempfile.TemporaryDirectory(prefix="fastmtp-offload-") as folder:
        loaded = load_verifier(verifier, Path(folder), offload=offload)
        return forward_states(loaded, [[*prompt, *answer] for prompt, answer in rows], _PASS_TOKENS, on_done)


def _objective(checkpoint: Path, depth: int) -> Objective:
    """The head of a checkpoint, ready to draft `depth` tokens."""
    config = TrainConfig(num_steps=depth)
    with tempfile.TemporaryDirectory(prefix="fastmtp-head-") as folder:
        extract(checkpoint, Path(folder) / "head", Reporter("extract", quiet=True))
        objective = HeadFiles(open_checkpoint(checkpoint), Path(folder) / "head").objective(config, pick_device(config))
    return objective.eval()


def _compared(
    head: Head, name: str, lengths: Lengths, counted: Measurement | None, num_speculative_tokens: int
) -> ReferenceWalk:
    walked = lengths[num_speculative_tokens]
    apart = []
    if counted is not None:
        apart = [ours - theirs for ours, theirs in zip(walked.acceptance, counted.acceptance, strict=True)]
    return ReferenceWalk(
        head=head, set=name, num_speculative_tokens=num_speculative_tokens, walked=walked, counted=counted,
        apart=apart, alarm=any(abs(difference) > TOLERANCE for difference in apart),
        lengths={steps: found.mean_acceptance_length for steps, found in lengths.items()},
    )  # fmt: skip
