"""Answers by transformers, in this process: batches of like length that shrink as their rows end.

One forward pass per token and batch, as `generate` does, without what `generate` does around it. A row that has ended
leaves the batch, caches of linear attention included, so that a long answer does not keep short ones company. The
states after the final norm, which each of these passes makes anyway, are handed on with the answer: they cost no pass
of their own. Not for families that put anything but the output head behind the final norm; none of ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fastmtp.config import SamplingConfig
from fastmtp.data.answers import OnAnswer
from fastmtp.data.engines.loading import Loaded
from fastmtp.errors import DataError
from fastmtp.servers.client import Answer, Request

# A batch shrinks once an eighth of it has ended: moving the caches costs something too.
_SHRINK_AT = 8


class LocalEngine:
    """A verifier in this process.

    Args:
        load: gives it when it is first wanted.
        ends: tokens that end an answer.
        pad: token that fills up prompts on the left.
        capture: hand on the states of prompt and answer.
        patient: answer also where the verifier does not fit, and every token reads it from disk.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        *,
        ends: set[int],
        pad: int,
        sampling: SamplingConfig,
        batch_size: int,
        capture: bool,
        patient: bool = False,
    ) -> None:
        self.name = f"transformers, {batch_size} at once"
        self._load, self._ends, self._pad = load, ends, pad
        self._sampling, self._batch_size, self._capture, self._patient = sampling, batch_size, capture, patient

    def start(self) -> None:
        """Load the verifier. Raises DataError where it does not fit, unless that was asked for."""
        loaded = self._load()
        if loaded.offloaded and not self._patient:
            raise DataError(
                f"The verifier does not fit: for every token it would be read from disk ({loaded.where}).",
                mend="Let vLLM answer (data.backend, data.server), or say data.offload: true to wait for it.",
                pointer="/data/backend",
            )

    @torch.inference_mode()
    def answer(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        """Answer all, longest prompts first: whether they fit into memory is known at once."""
        loaded = self._load()
        head = loaded.model.get_output_embeddings()
        order = sorted(range(len(requests)), key=lambda place: -len(requests[place].prompt))
        for begin in range(0, len(order), self._batch_size):
            places = order[begin : begin + self._batch_size]
            batch = _Batch(loaded, [requests[place] for place in places], self._pad, capture=self._capture)
            while batch.size:
                batch.take(self._pick(head(batch.hidden).float(), batch), self._ends)
                if self._capture:  # the state of an answer's last token takes a step that nothing else needs
                    batch.step()
                for row, answer, states in batch.ended():
                    on_answer(places[row], answer, states)
                batch.shrink()
                if batch.size and not self._capture:
                    batch.step()

    def _pick(self, logits: Tensor, batch: _Batch) -> Tensor:
        """The next token of each line [b], from logits [b, V]."""
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        return choose(logits, self._sampling, batch.uniforms())


class _Batch:
    """Rows that are decoded together. A line is a place in the tensors, a row a request; lines go, rows stay.

    Attributes:
        hidden: [b, H], the states from which each line's next token is read.
    """

    def __init__(self, loaded: Loaded, requests: Sequence[Request], pad: int, *, capture: bool) -> None:
        self._base, self._requests, self._capture = loaded.model.base_model, requests, capture
        device, count = loaded.device, len(requests)
        self._width = max(len(request.prompt) for request in requests)
        room = max(request.max_tokens for request in requests)
        ids = torch.full((count, self._width), pad)
        mask = torch.ones(count, self._width + room, dtype=torch.int64)
        for row, request in enumerate(requests):
            begin = self._width - len(request.prompt)
            ids[row, begin:] = torch.tensor(request.prompt)
            mask[row, :begin] = 0
        self._rows = list(range(count))
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._finish = [""] * count
        self._sent = [False] * count
        self._uniforms: Tensor | None = None
        self._mask = mask.to(device)
        self._steps = 0
        positions = (self._mask[:, : self._width].cumsum(1) - 1).clamp(min=0)
        out = self._base(
            input_ids=ids.to(device),
            attention_mask=self._mask[:, : self._width],
            position_ids=positions,
            use_cache=True,
        )
        self._cache = out.past_key_values
        self._last = positions[:, -1]
        self.hidden: Tensor = out.last_hidden_state[:, -1]
        if capture:
            self._of_prompts: Tensor = out.last_hidden_state
            self._of_answers = self.hidden.new_empty(count, room, self.hidden.shape[-1])

    @property
    def size(self) -> int:
        """Lines that are left."""
        return len(self._rows)

    def take(self, tokens: Tensor, ends: set[int]) -> None:
        """Append a token [b] to each row that has not ended."""
        self._next = tokens[:, None]
        for row, token in zip(self._rows, tokens.tolist(), strict=True):
            if not self._finish[row]:
                self._tokens[row].append(token)
                full = len(self._tokens[row]) == self._requests[row].max_tokens
                self._finish[row] = "stop" if token in ends else "length" if full else ""

    def step(self) -> None:
        """Run the tokens that were taken last."""
        self._last = self._last + 1
        seen = self._width + self._steps + 1
        out = self._base(
            input_ids=self._next, attention_mask=self._mask[:, :seen], position_ids=self._last[:, None],
            past_key_values=self._cache, use_cache=True,
        )  # fmt: skip
        self.hidden = out.last_hidden_state[:, 0]
        if self._capture:
            self._of_answers[self._rows, self._steps] = self.hidden
        self._steps += 1

    def ended(self) -> Iterator[tuple[int, Answer, Tensor | None]]:
        """Rows that have ended and were not given before: row, answer, states [n, H] on the CPU."""
        for row in self._rows:
            if self._finish[row] and not self._sent[row]:
                self._sent[row] = True
                answer = Answer(tuple(self._tokens[row]), self._finish[row])
                yield row, answer, self._states(row) if self._capture else None

    def shrink(self) -> None:
        """Drop the lines whose rows have ended, where that is worth while."""
        keep = [line for line, row in enumerate(self._rows) if not self._finish[row]]
        if _SHRINK_AT * (len(self._rows) - len(keep)) < len(self._rows):
            return
        self._rows = [self._rows[line] for line in keep]
        if not keep:
            return
        lines = torch.tensor(keep)
        self._cache.reorder_cache(lines)
        self._mask, self._last, self.hidden = (part[lines] for part in (self._mask, self._last, self.hidden))
        self._next = self._next[lines]

    def uniforms(self) -> Tensor:
        """[b] numbers in [0, 1) for the next token of each line: each row's own sequence."""
        if self._uniforms is None:
            room = self._mask.shape[1] - self._width
            drawn = [
                torch.rand(room, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
                for request in self._requests
            ]
            self._uniforms = torch.stack(drawn).to(self.hidden.device)
        return self._uniforms[self._rows, self._steps]

    def _states(self, row: int) -> Tensor:
        prompt, answer = len(self._requests[row].prompt), len(self._tokens[row])
        return torch.cat([self._of_prompts[row, self._width - prompt :], self._of_answers[row, :answer]]).cpu()


def choose(logits: Tensor, sampling: SamplingConfig, uniforms: Tensor) -> Tensor:
    """Sample a token [b] from logits [b, V]: temperature, then top-k, then top-p, and the inverse of what is left.

    Args:
        uniforms: [b] float64 in [0, 1), which decide.
    """
    ordered, tokens = (logits / sampling.temperature).sort(-1, descending=True)
    shares = ordered.double().softmax(-1)
    if sampling.top_k:
        shares[:, sampling.top_k :] = 0
        shares = shares / shares.sum(-1, keepdim=True)
    # A token stays while those before it do not have top_p yet; so there is always one.
    shares[shares.cumsum(-1) - shares >= sampling.top_p] = 0
    reached = shares.cumsum(-1)
    place = torch.searchsorted(reached, uniforms[:, None] * reached[:, -1:], right=True)
    return tokens.gather(-1, place.clamp(max=logits.shape[-1] - 1)).squeeze(-1)
