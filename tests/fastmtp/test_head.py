"""The recursion against a token-by-token simulation with a real KV cache, and packing against rows alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmtp.data.rows import PackedRows
from fastmtp.head import MTPHead, StepOutput
from fastmtp.losses import token_losses
from tests.fastmtp.fixtures import VOCAB
from tests.fastmtp.heads import OTHERS, TRAINABLE, head_of

STEPS = 3


class CachedAttention:
    """vLLM's view: one KV cache; a call appends its keys and each query sees everything up to its own slot."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = []
        for place in range(query.shape[2]):
            self.keys.append(key[:, :, place])
            self.values.append(value[:, :, place])
            keys, values = torch.stack(self.keys, 2), torch.stack(self.values, 2)
            group = query.shape[1] // key.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            weights = (query[:, :, place, None] @ keys.transpose(-1, -2) * scaling).softmax(-1)
            out.append(weights @ values)
        return torch.cat(out, 2).transpose(1, 2)


def rows_of(lengths: tuple[int, ...], hidden: int = 16, seed: int = 0) -> PackedRows:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(VOCAB, (total,), generator=generator)
    states = torch.randn(total, hidden, generator=generator)
    mask = torch.cat([torch.arange(length) >= length // 2 for length in lengths])
    return PackedRows(ids, states, mask, lengths)


def embedding_of() -> Tensor:
    return torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(1))


def simulate(head: MTPHead, ids: Tensor, states: Tensor, embedding: Tensor, origin: int) -> list[Tensor]:
    """Draft from one origin the way vLLM does: prefill step 0 up to it, then one token at a time."""
    cache = CachedAttention()
    prefix = torch.arange(origin + 1)
    y, carried = head.step(states[prefix], F.embedding(ids[prefix + 1], embedding), prefix, cache)
    drafts, carried = [y[-1]], carried[-1:]
    for step in range(1, STEPS):
        if origin + step + 1 >= len(ids):
            break
        place = torch.tensor([origin + step])
        y, carried = head.step(carried, F.embedding(ids[place + 1], embedding), place, cache)
        drafts.append(y[0])
    return drafts


def drafts_of(head: MTPHead, rows: PackedRows, embedding: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(origin, step, state) of every draft at every origin of every row, as vLLM would make them one by one."""
    start = 0
    for length in rows.lengths:
        part = slice(start, start + length)
        for place in range(length - 1):
            found = simulate(head, rows.input_ids[part], rows.hidden_states[part], embedding, place)
            yield from ((start + place, step, y) for step, y in enumerate(found))
        start += length


@pytest.mark.parametrize("name", [*TRAINABLE, *OTHERS])
def test_serving_recursion_equals_decoding_with_a_cache(name: str) -> None:
    head, rows, embedding = head_of(name), rows_of((7, 2, 11)), embedding_of()
    with torch.no_grad():
        outputs = list(head.serving(rows, embedding, STEPS, rows.remaining() >= 1))
        compared = 0
        for origin, step, y in drafts_of(head, rows, embedding):
            found = outputs[step].states[outputs[step].origins == origin]
            torch.testing.assert_close(found[0], y, atol=1e-5, rtol=1e-5)
            compared += 1
    assert compared == sum(len(output.origins) for output in outputs) > 40


@pytest.mark.parametrize("name", [*TRAINABLE, *OTHERS])
def test_at_chosen_origins_it_is_the_same_with_the_same_gradients(name: str) -> None:
    """What is left out, step 0 beyond its keys and values at places that are no origin, changes nothing."""
    head, rows, embedding = head_of(name), rows_of((9, 5, 3, 8)), embedding_of()
    origins = torch.zeros(25, dtype=torch.bool)
    origins[[3, 4, 6, 9, 12, 19, 22]] = True  # gaps, a row's first place, a row without any
    outputs = head(rows, embedding, STEPS, origins)
    pull = torch.randn(25, STEPS, 16, generator=torch.Generator().manual_seed(2))
    ours = torch.stack([(o.states * pull[o.origins, step]).sum() for step, o in enumerate(outputs)]).sum()
    drafts = [(y * pull[t, k]).sum() for t, k, y in drafts_of(head, rows, embedding) if origins[t]]
    assert len(drafts) == sum(len(output.origins) for output in outputs)
    parameters = dict(head.named_parameters())
    found, expected = (torch.autograd.grad(total, parameters.values()) for total in (ours, torch.stack(drafts).sum()))
    for key, one, other in zip(parameters, found, expected, strict=True):
        assert other.abs().max() > 0, key
        scale = float(other.abs().max())
        torch.testing.assert_close(one / scale, other / scale, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("recursion", ["serving", "plain"])
@pytest.mark.parametrize("name", TRAINABLE)
def test_packed_rows_give_what_they_give_alone(name: str, recursion: str) -> None:
    """Case T4: states, losses and gradients of packed rows equal those of the rows one by one."""
    head, rows, embedding = head_of(name), rows_of((5, 9, 4)), embedding_of()
    fields = (rows.input_ids, rows.hidden_states, rows.loss_mask)
    alone = [
        PackedRows(*parts, (len(parts[0]),)) for parts in zip(*(f.split(rows.lengths) for f in fields), strict=True)
    ]
    packed = head(rows, embedding, STEPS, rows.loss_mask, recursion)
    single = [head(row, embedding, STEPS, row.loss_mask, recursion) for row in alone]
    output = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(3))

    def loss(batch: PackedRows, outputs: list[StepOutput]) -> Tensor:
        total = torch.zeros(())
        for step, found in enumerate(outputs):
            kept = batch.counted(step)[found.origins]
            targets = batch.input_ids[found.origins[kept] + step + 2]
            total = total + token_losses(found.states[kept], output, targets).total
        return total

    together = loss(rows, packed)
    apart = torch.stack([loss(row, outputs) for row, outputs in zip(alone, single, strict=True)]).sum()
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    for step in range(STEPS):
        expected = torch.cat([outputs[step].states for outputs in single if step < len(outputs)])
        torch.testing.assert_close(packed[step].states, expected, atol=1e-5, rtol=1e-5)
    parameters = list(head.parameters())
    for one, other in zip(
        torch.autograd.grad(together, parameters), torch.autograd.grad(apart, parameters), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5 * max(1.0, float(other.abs().max())), rtol=1e-5)


def test_the_two_recursions_differ_after_step_0() -> None:
    """Guards the parity test itself: it must be able to tell them apart."""
    head, rows, embedding = head_of("qwen3-next"), rows_of((12,)), embedding_of()
    with torch.no_grad():
        serving, plain = (head(rows, embedding, STEPS, rows.loss_mask, name) for name in ("serving", "plain"))
    torch.testing.assert_close(serving[0].states, plain[0].states)
    assert (serving[1].states - plain[1].states).abs().max() > 1e-2


def test_no_origin_gives_no_step() -> None:
    head, rows = head_of("qwen3-next"), rows_of((4, 1))
    assert head(rows, embedding_of(), STEPS, torch.zeros(5, dtype=torch.bool)) == []
    last_of_each_row = torch.tensor([False, False, False, True, True])
    assert head(rows, embedding_of(), STEPS, last_of_each_row) == []


def test_two_lengths_in_one_process() -> None:
    """Case T8: nothing is kept from one batch that would not fit the next."""
    head, embedding = head_of("qwen3.5-moe"), embedding_of()
    for lengths in ((6,), (30, 2), (6,)):
        rows = rows_of(lengths)
        outputs = head(rows, embedding, STEPS, rows.loss_mask)
        assert all(torch.isfinite(output.states).all() for output in outputs)


def test_what_is_kept_for_the_gradient_grows_with_tokens() -> None:
    """Twice the tokens, half of them origins: at most twice the memory between forward and backward."""
    head, embedding, kept = head_of("qwen3-next"), embedding_of(), []
    for length in (512, 1024):
        rows = rows_of((length,))
        saved: dict[int, int] = {}

        def keep(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            head(rows, embedding, STEPS, rows.loss_mask)
        kept.append(sum(saved.values()))
    assert kept[1] < 2.1 * kept[0]


def test_bf16_compute_is_close_to_fp32() -> None:
    head, rows, embedding = head_of("qwen3-next"), rows_of((20,)), embedding_of()
    expected = head(rows, embedding, STEPS, rows.loss_mask)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(rows.to(torch.device("cpu"), torch.bfloat16), embedding.bfloat16(), STEPS, rows.loss_mask)
    torch.stack([output.states.float().sum() for output in found]).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in head.parameters())
    # Far from equal where rounding sends a token to another expert; most are not.
    gaps = [(one.states - other.states).norm(dim=-1) for one, other in zip(found, expected, strict=True)]
    assert torch.cat(gaps).median() < 0.1 * expected[0].states.norm(dim=-1).median()
