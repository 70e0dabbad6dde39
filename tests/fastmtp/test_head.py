"""The recursion against a token-by-token simulation with a real KV cache, and packing against rows alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmtp.data.rows import PackedRows
from fastmtp.errors import CheckpointError
from fastmtp.families.base import Layout
from fastmtp.head import MTPHead, from_native, head_from_config, to_native
from tests.fastmtp.fixtures import VOCAB, config_dict, random_head

FAMILIES = ["qwen3-next", "qwen3.5", "qwen3.5-moe"]
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


@pytest.mark.parametrize("family", FAMILIES)
def test_serving_recursion_equals_decoding_with_a_cache(family: str) -> None:
    head, rows = random_head(family), rows_of((7, 2, 11))
    embedding = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(1))
    origins = rows.remaining() >= 1
    with torch.no_grad():
        outputs = list(head.serving(rows, embedding, STEPS, origins))
        compared, start = 0, 0
        for length in rows.lengths:
            part = slice(start, start + length)
            for place in range(length - 1):
                expected = simulate(head, rows.input_ids[part], rows.hidden_states[part], embedding, place)
                for step, y in enumerate(expected):
                    found = outputs[step].states[outputs[step].origins == start + place]
                    torch.testing.assert_close(found[0], y, atol=1e-5, rtol=1e-5)
                    compared += 1
            start += length
    assert compared == sum(len(output.origins) for output in outputs) > 40


@pytest.mark.parametrize("recursion", ["serving", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_do_not_see_each_other(family: str, recursion: str) -> None:
    head, rows = random_head(family), rows_of((5, 9, 4))
    embedding = torch.randn(VOCAB, 16)
    alone = [
        PackedRows(ids, states, mask, (len(ids),))
        for ids, states, mask in zip(
            rows.input_ids.split(rows.lengths),
            rows.hidden_states.split(rows.lengths),
            rows.loss_mask.split(rows.lengths),
            strict=True,
        )
    ]
    run = getattr(head, recursion)
    with torch.no_grad():
        packed = list(run(rows, embedding, STEPS, rows.loss_mask))
        single = [list(run(row, embedding, STEPS, row.loss_mask)) for row in alone]
    for step in range(STEPS):
        expected = torch.cat([outputs[step].states for outputs in single if step < len(outputs)])
        torch.testing.assert_close(packed[step].states, expected, atol=1e-5, rtol=1e-5)


def test_the_two_recursions_differ_after_step_0() -> None:
    """Guards the parity test itself: it must be able to tell them apart."""
    head, rows = random_head("qwen3-next"), rows_of((12,))
    embedding = torch.randn(VOCAB, 16)
    with torch.no_grad():
        serving = list(head.serving(rows, embedding, STEPS, rows.loss_mask))
        plain = list(head.plain(rows, embedding, STEPS, rows.loss_mask))
    torch.testing.assert_close(serving[0].states, plain[0].states)
    assert (serving[1].states - plain[1].states).abs().max() > 1e-2


def test_projection_takes_the_embedding_first() -> None:
    """Case T1: W[:, :H] norm(e) + W[:, H:] norm(h), gain 1 + w."""
    head = random_head("qwen3-next")
    embedded, hidden = torch.randn(3, 16), torch.randn(3, 16)
    seen: dict[str, Tensor] = {}
    hook = head.layers[0].register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    with torch.no_grad():
        head.step(hidden, embedded, torch.arange(3), CachedAttention())
    hook.remove()

    def normed(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)

    weight = head.fc.weight
    expected = (
        normed(embedded, head.pre_fc_norm_embedding.weight) @ weight[:, :16].T
        + normed(hidden, head.pre_fc_norm_hidden.weight) @ weight[:, 16:].T
    )
    torch.testing.assert_close(seen["x"][0], expected, atol=1e-5, rtol=1e-5)


def test_targets_are_exactly_the_assistants_tokens() -> None:
    """Case T3: ids 0..9, answer 5..9: step k at t targets t+k+2 and counts iff that token is the assistant's."""
    mask = torch.arange(10) >= 5
    rows = PackedRows(torch.arange(10), torch.zeros(10, 1), mask, (10,))
    for step in range(STEPS):
        origins = rows.counted(step).nonzero().squeeze(1)
        assert (origins + step + 2).tolist() == [5, 6, 7, 8, 9]


def test_targets_never_cross_a_row() -> None:
    """Case T4: the last k+2 positions of a row give no target, also when the next row begins with an answer."""
    mask = torch.tensor([0, 1, 1, 1, 1] + [1, 1, 1, 1], dtype=torch.bool)
    rows = PackedRows(torch.arange(9), torch.zeros(9, 1), mask, (5, 4))
    assert rows.counted(0).tolist() == [True, True, True, False, False, True, True, False, False]
    assert rows.counted(2).tolist() == [True, False, False, False, False, False, False, False, False]


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_native_names_and_module_names_are_inverses(family: str, layout: Layout) -> None:
    head = random_head(family)
    native = to_native(head.state_dict(), config_dict(family), layout)
    assert all(key.startswith("mtp.") for key in native)
    again = from_native(native, config_dict(family))
    assert again.keys() == head.state_dict().keys()
    assert all(torch.equal(again[key], value) for key, value in head.state_dict().items())
    fresh = head_from_config(config_dict(family))
    fresh.load_state_dict(again, strict=True)


def test_missing_expert_is_named() -> None:
    native = to_native(random_head("qwen3-next").state_dict(), config_dict("qwen3-next"), "split")
    del native["mtp.layers.0.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj"):
        from_native(native, config_dict("qwen3-next"))
