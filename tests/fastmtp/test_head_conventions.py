"""What differs between families, in the head itself; that it is loaded whole; and the names it is stored under."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastmtp.data.rows import PackedRows
from fastmtp.errors import CheckpointError
from fastmtp.families.base import Layout
from fastmtp.head import from_native, head_from_config, load_native, to_native
from tests.fastmtp.fixtures import VOCAB, config_dict
from tests.fastmtp.heads import OTHERS, TRAINABLE, head_of

HIDDEN = 16
Native = dict[str, Tensor]


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain


@pytest.mark.parametrize(
    ("name", "embedding_first", "gain_above_one"),
    [*((name, True, True) for name in TRAINABLE), ("glm4-moe", True, False), ("mimo", False, False)],
)
def test_projection(name: str, embedding_first: bool, gain_above_one: bool) -> None:
    """Case T1: W[:, :H] norm(e) + W[:, H:] norm(h) for Qwen, DeepSeek and GLM, the other way round for MiMo."""
    head = head_of(name)
    embedded, hidden = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN) * 5
    add = 1.0 if gain_above_one else 0.0
    e = normed(embedded, head.pre_fc_norm_embedding.weight + add)
    h = normed(hidden, head.pre_fc_norm_hidden.weight + add)
    first, second = (e, h) if embedding_first else (h, e)
    weight = head.fc.weight
    expected = first @ weight[:, :HIDDEN].T + second @ weight[:, HIDDEN:].T
    found = head.project(hidden, embedded, torch.arange(1, 4))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - (second @ weight[:, :HIDDEN].T + first @ weight[:, HIDDEN:].T)).abs().max() > 0.1


def record(head: torch.nn.Module, *names: str) -> dict[str, list[Tensor]]:
    """What submodules are given, call by call."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        head.get_submodule(name).register_forward_pre_hook(lambda _m, args, to=seen[name]: to.append(args[0]))
    return seen


def one_row(length: int = 9) -> tuple[PackedRows, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (length,), generator=generator)
    states = torch.randn(length, HIDDEN, generator=generator) * 3  # RMS far from 1
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    return PackedRows(ids, states, torch.ones(length, dtype=torch.bool), (length,)), embedding


@pytest.mark.parametrize("recursion", ["serving", "plain"])
@pytest.mark.parametrize("name", [*TRAINABLE, *OTHERS])
def test_what_is_carried(name: str, recursion: str) -> None:
    """Case T2: Qwen and MiMo hand on y; GLM hands on what the norm was given. Step 0 reads the verifier's state."""
    head, (rows, embedding) = head_of(name), one_row()
    seen = record(head, "pre_fc_norm_hidden", "norm")
    outputs = head(rows, embedding, 3, torch.ones(9, dtype=torch.bool), recursion)
    states = seen["pre_fc_norm_hidden"]
    torch.testing.assert_close(states[0][:8], rows.hidden_states[:8])
    for step in (1, 2):
        given = seen["norm"][step - 1] if name == "glm4-moe" else outputs[step - 1].states
        torch.testing.assert_close(states[step], given[: len(states[step])])
        assert (seen["norm"][step - 1] - outputs[step - 1].states).abs().max() > 0.1


def test_a_step_embeds_the_next_token() -> None:
    """Case T3: step k at position t reads the embedding of x_{t+k+1}."""
    head, (rows, embedding) = head_of("qwen3-next"), one_row()
    seen = record(head, "pre_fc_norm_embedding")["pre_fc_norm_embedding"]
    outputs = head(rows, embedding, 3, torch.ones(9, dtype=torch.bool))
    for step, output in enumerate(outputs):
        torch.testing.assert_close(seen[step], embedding[rows.input_ids[output.origins + step + 1]])


@pytest.mark.parametrize("zeroed", [True, False])
def test_embedding_at_position_0(zeroed: bool) -> None:
    """Case T6: where vLLM zeroes the first position's embedding, so do we, at step 0 of t=0 and nowhere else."""
    head, (rows, embedding) = head_of("qwen3-next", zero_first_embedding=zeroed), one_row()
    seen = record(head, "pre_fc_norm_embedding")["pre_fc_norm_embedding"]
    found = head(rows, embedding, 3, torch.ones(9, dtype=torch.bool))
    expected = embedding[rows.input_ids[1:]]
    expected = torch.where((torch.arange(8) == 0)[:, None] & torch.tensor(zeroed), torch.zeros(()), expected)
    torch.testing.assert_close(seen[0], expected)
    assert all((later.abs().sum(-1) > 0).all() for later in seen[1:])
    # The reference: a head without the flag that is given a zero for the first token's embedding.
    plain, ids = head_of("qwen3-next"), rows.input_ids.clone()
    ids[1] = VOCAB
    with_zero = torch.cat([embedding, torch.zeros(1, HIDDEN)])
    reference = plain(
        PackedRows(ids, rows.hidden_states, rows.loss_mask, rows.lengths), with_zero, 1, torch.ones(9, dtype=torch.bool)
    )
    same = torch.allclose(found[0].states, reference[0].states, atol=1e-5)
    assert same == zeroed


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_layer_is_full_attention(name: str) -> None:
    """Case T10: whatever the backbone's own first layer is."""
    config = config_dict(name) | {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
    names = {key for key, _ in head_from_config(config).named_parameters()}
    assert {"layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"} <= names
    assert not any("linear_attn" in key for key in names)


def test_a_family_without_classes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not trained yet"):
        head_from_config({"model_type": "mimo", "hidden_size": 8})


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize("name", TRAINABLE)
def test_native_names_and_module_names_are_inverses(name: str, layout: Layout) -> None:
    head, config = head_of(name), config_dict(name)
    native = to_native(head.state_dict(), config, layout)
    assert all(key.startswith("mtp.") for key in native)
    again = from_native(native, config)
    assert again.keys() == head.state_dict().keys()
    assert all(torch.equal(again[key], value) for key, value in head.state_dict().items())
    fresh = head_from_config(config)
    load_native(fresh, native, config)
    assert all(torch.equal(value, head.state_dict()[key]) for key, value in fresh.state_dict().items())


def without(key: str) -> Any:  # noqa: ANN401 - a change
    return lambda native: native.pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("mtp.layers.0.mlp.experts.2.up_proj.weight"),
            r"lacks mtp\.layers\.0\.mlp\.experts\.2\.up_proj\.weight",
        ),
        (without("mtp.norm.weight"), r"lacks mtp\.norm\.weight"),
        (lambda native: native.update({"mtp.layers.0.extra": torch.ones(1)}), r"no place for mtp\.layers\.0\.extra"),
        (lambda native: native.update({"mtp.more": torch.ones(1)}), r"no place for mtp\.more"),
        (
            lambda native: native.update({"mtp.fc.weight": native["mtp.fc.weight"][:, :16]}),
            r"mtp\.fc\.weight has shape \[16, 16\]; config\.json asks for \[16, 32\]",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_named(change: Any, message: str) -> None:  # noqa: ANN401
    """Case T10: a missing, an unexpected or a misshapen tensor is an error."""
    config = config_dict("qwen3-next")
    native: Native = to_native(head_of("qwen3-next").state_dict(), config, "split")
    change(native)
    with pytest.raises(CheckpointError, match=message):
        load_native(head_from_config(config), native, config)
