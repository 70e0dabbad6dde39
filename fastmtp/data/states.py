"""The verifier's hidden states after its final norm: from a forward pass, or held against one on a few rows.

In a pass rows of like length go together, padded on the right, where nothing real looks; no logits are made. States
that came otherwise are compared, since a mix-up of rows or norms shows nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastmtp.config import DataConfig
from fastmtp.data.engines.loading import Loaded, Loader
from fastmtp.data.masks import Span
from fastmtp.errors import DataError

# Two passes in bf16 that sum in other orders differ by less than 0.01; states of another row by about 1.
TOLERANCE = 0.05
COMPARED_ROWS = 4

# Rows of token ids, and who hears how many tokens are done -> their states [n, H].
StateSource = Callable[[Sequence[Sequence[int]], Callable[[int], None]], list[Tensor]]


@contextlib.contextmanager
def state_source(config: DataConfig, loader: Loader, directory: Path) -> Iterator[StateSource]:
    """Yield who computes states: transformers, or vLLM, which is ended on leaving.

    Args:
        directory: where vLLM may leave its log and what it hands over.

    Raises:
        DataError: vLLM is wanted and there is no GPU.
    """
    if config.states_from != "vllm":
        yield lambda rows, on_done: forward_states(loader.get(), rows, config.states_tokens, on_done)
        return
    from fastmtp.data.engines.extraction import extracting

    with extracting(loader, config, directory) as source:
        yield source


@torch.inference_mode()
def forward_states(
    verifier: Loaded, rows: Sequence[Sequence[int]], tokens: int, on_done: Callable[[int], None] | None = None
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
        with _WideProducts() if verifier.device.type == "cpu" and not _has_bf16() else contextlib.nullcontext():
            hidden: Tensor = verifier.model.base_model(
                input_ids=padded.to(verifier.device), use_cache=False
            ).last_hidden_state.cpu()
        for line, place in enumerate(places):
            # A copy of its own: a view would keep the padding of all the batch in memory.
            found[place] = hidden[line, : len(rows[place])].clone()
        if on_done:
            on_done(sum(len(rows[place]) for place in places))
    return [found[place] for place in range(len(rows))]


class _WideProducts(TorchFunctionMode):
    """Multiplies bf16 matrices as fp32 and rounds the result, as a sum kept in fp32 does: two to three times as fast on
    a processor that has no bf16 of its own."""

    def __torch_function__(  # noqa: D105
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever torch's functions take and give
        if func is torch.nn.functional.linear and not kwargs and args[0].dtype is torch.bfloat16:
            return func(*(None if arg is None else arg.float() for arg in args)).bfloat16()
        return func(*args, **(kwargs or {}))


def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
    """How far apart two [n, H] are: size of the difference over that of the second, the median over positions.

    The median, since rounding may send a token to another expert, which changes that position much and others little.
    """
    difference = (found.float() - fresh.float()).norm(dim=-1)
    return float((difference / fresh.float().norm(dim=-1).clamp(min=1e-12)).median())


def own_share(verifier: Loaded, rows: Sequence[tuple[Sequence[int], Sequence[Span]]], tokens: int) -> float:
    """Share of the supervised tokens of some (ids, spans) that the verifier would have said itself, greedily."""
    states = forward_states(verifier, [ids for ids, _ in rows], tokens)
    head = verifier.model.get_output_embeddings()
    own = said = 0
    with torch.inference_mode():
        for (ids, spans), row in zip(rows, states, strict=True):
            for begin, end in spans:
                choices = head(row[begin - 1 : end - 1].to(verifier.device)).argmax(-1).cpu()
                own += int((choices == torch.tensor(ids[begin:end])).sum())
                said += end - begin
    return own / max(said, 1)


def require_agreement(found: Mapping[int, Tensor], verifier: Loaded, rows: Sequence[Sequence[int]], who: str) -> None:
    """Raise DataError where the states that `who` gave for some rows (by place) are not those of a forward pass."""
    for place, states in found.items():
        fresh = forward_states(verifier, [rows[place]], len(rows[place]))[0]
        if states.shape != fresh.shape or not disagreement(states, fresh) <= TOLERANCE:
            off = disagreement(states, fresh) if states.shape == fresh.shape else float("inf")
            raise DataError(
                f"The hidden states that {who} gave for row {place} are not those of a pass of this verifier after its"
                f" final norm: they differ by {off:.2f} of their size, where {TOLERANCE} is rounding.",
                mend="Use data.states_from: transformers.", pointer="/data/states_from",
            )  # fmt: skip
