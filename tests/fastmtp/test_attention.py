"""Attention over packed rows, block by block, against dense softmax: values, gradients, and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastmtp import attention
from fastmtp.attention import ServingCache
from fastmtp.data.rows import PackedRows

HEADS, KV_HEADS, SIZE, SCALING = 4, 2, 8, 0.3


def packed(lengths: tuple[int, ...]) -> PackedRows:
    total = sum(lengths)
    return PackedRows(torch.zeros(total, dtype=torch.int64), torch.zeros(total, 1), torch.zeros(total).bool(), lengths)


def parts(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of `count` tokens, as the decoder layer gives them."""
    query = torch.randn(1, HEADS, count, SIZE, generator=generator)
    key, value = (torch.randn(1, KV_HEADS, count, SIZE, generator=generator) for _ in range(2))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def dense(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [heads, D] over keys and values [kv_heads, L, D] -> [heads, D]."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (keys, values))
    weights = (torch.einsum("hd,hld->hl", query, keys) * SCALING).softmax(-1)
    return torch.einsum("hl,hld->hd", weights, values)


@pytest.mark.parametrize("block", [1, 90, 10**6])
def test_equals_dense_attention_over_prefix_and_chain(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CPU_BLOCK", block)
    rows = packed((9, 3, 12, 5))
    origins = torch.tensor([2, 3, 6, 13, 14, 22, 26])  # none in the second row, gaps in the others
    generator = torch.Generator().manual_seed(0)
    cache = ServingCache(rows, origins)
    assert cache.context.tolist() == [0, 1, 4, 5, 12, 15, 16, 17, 18, 19, 20, 21, 24, 25]
    context, *steps = [parts(generator, count) for count in (len(cache.context), *[len(origins)] * 3)]
    cache.remember(*context, SCALING)
    found = [cache.begin(*steps[0], SCALING), *(cache.extend(*step, SCALING) for step in steps[1:])]

    base = torch.zeros(2, KV_HEADS, len(rows.input_ids), SIZE)
    for which in (0, 1):
        base[which] = base[which].index_copy(1, cache.context, context[which + 1][0])
        base[which] = base[which].index_copy(1, origins, steps[0][which + 1][0])
    row_starts = {0: 0, 2: 12, 3: 24}
    expected = torch.zeros(3, len(origins), HEADS, SIZE)
    for step in range(3):
        for place, origin in enumerate(origins.tolist()):
            span = slice(row_starts[int(rows.row_of()[origin])], origin + 1)
            chain = [[steps[k][which][0, :, place, None] for k in range(1, step + 1)] for which in (1, 2)]
            keys, values = (torch.cat([base[which][:, span], *chain[which]], 1) for which in (0, 1))
            expected[step, place] = dense(steps[step][0][0, :, place], keys, values)

    torch.testing.assert_close(torch.cat(found), expected, atol=1e-6, rtol=1e-5)
    pull = torch.randn(expected.shape, generator=generator)
    leaves = [context[1], context[2], *(tensor for step in steps for tensor in step)]
    ours = torch.autograd.grad((torch.cat(found) * pull).sum(), leaves)
    theirs = torch.autograd.grad((expected * pull).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_narrowing_drops_origins_with_their_chains() -> None:
    rows, generator = packed((8, 6)), torch.Generator().manual_seed(1)
    origins, keep = torch.tensor([1, 3, 9, 11]), torch.tensor([True, False, True, False])
    whole, narrowed = ServingCache(rows, origins), ServingCache(rows, origins)
    context, first, second, third = (parts(generator, count) for count in (len(whole.context), 4, 4, 4))
    for cache in (whole, narrowed):
        cache.remember(*context, SCALING)
        cache.begin(*first, SCALING)
        cache.extend(*second, SCALING)
    narrowed.narrow(keep)
    query, key, value = (part[:, :, keep] for part in third)
    expected = whole.extend(*third, SCALING)[:, keep]
    torch.testing.assert_close(narrowed.extend(query, key, value, SCALING), expected)


def test_scores_exist_for_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass makes a matrix of origins by tokens; only what grows with tokens is kept in between."""
    monkeypatch.setattr(attention, "_CPU_BLOCK", 4096)
    sizes: list[int] = []
    scores = attention._scores

    def spy(*args: object) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = scores(*args)  # type: ignore[arg-type]
        sizes.append(found[0].numel())
        return found

    monkeypatch.setattr(attention, "_scores", spy)
    kept: dict[int, int] = {}
    for length in (256, 512):
        rows, origins = packed((length,)), torch.arange(length // 2, length - 1)
        cache, generator = ServingCache(rows, origins), torch.Generator()
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(x.numel()) or x, lambda x: x):
            cache.remember(*parts(generator, len(cache.context)), SCALING)
            cache.begin(*parts(generator, len(origins)), SCALING)
            cache.extend(*parts(generator, len(origins)), SCALING).sum().backward()
        kept[length] = sum(saved)
        assert max(sizes) <= 4096
    assert len(sizes) > 100
    assert kept[512] < 2.1 * kept[256]
