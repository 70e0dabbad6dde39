"""Answers and states by transformers in this process, against `generate` and a plain forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import SamplingConfig
from fastmtp.data.engines.loading import Loaded, Loader, load_verifier
from fastmtp.data.engines.local import LocalEngine, choose
from fastmtp.data.states import batches, disagreement, forward_states, own_share
from fastmtp.errors import DataError
from fastmtp.servers.client import Answer, Request
from tests.fastmtp.fixtures import MODEL_TYPES, VOCAB, write_checkpoint

ENDS = {1, 9, 21, 40}  # several, so that random weights say one of them now and then


@pytest.fixture(scope="module", params=[*MODEL_TYPES, "wrapped"])
def verifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A verifier of each family in float32, where two ways to one result agree closely."""
    wrapped = request.param == "wrapped"
    place = tmp_path_factory.mktemp("m") / "m"
    path = write_checkpoint(place, "qwen3.5" if wrapped else request.param, wrapped=wrapped)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Loaded(model, torch.device("cpu"), offloaded=False, where="")


def requests_of(count: int, room: int = 40) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 40, (count,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB - 15, (length,), generator=generator).tolist() for length in lengths]
    return [Request(tuple(prompt), room - place % 7, seed=place) for place, prompt in enumerate(prompts)]


def ask(
    verifier: Loaded,
    requests: list[Request],
    *,
    batch: int = 8,
    capture: bool = True,
    patient: bool = False,
    **sampling: float,
) -> dict[int, tuple[Answer, Tensor | None]]:
    engine = LocalEngine(
        lambda: verifier, ends=ENDS, pad=0, sampling=SamplingConfig(**sampling), batch_size=batch, capture=capture,
        patient=patient,
    )  # fmt: skip
    found: dict[int, tuple[Answer, Tensor | None]] = {}

    def hear(place: int, answer: Answer, states: Tensor | None) -> None:
        assert place not in found
        found[place] = answer, states

    engine.start()
    engine.answer(requests, hear)
    return found


def test_answers_are_those_of_generate(verifier: Loaded) -> None:
    """Row by row, however batches shrink, with states and without; the token that ends an answer is kept."""
    requests = requests_of(20)
    found = ask(verifier, requests)
    assert sorted(found) == list(range(20))
    ends = set()
    for place, request in enumerate(requests):
        plain = verifier.model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([request.prompt]), do_sample=False, max_new_tokens=request.max_tokens,
            eos_token_id=sorted(ENDS), pad_token_id=0,
        )[0, len(request.prompt) :].tolist()  # fmt: skip
        answer, _ = found[place]
        assert list(answer.token_ids) == plain
        assert answer.finish == ("stop" if plain[-1] in ENDS else "length")
        ends.add(answer.finish)
    assert ends == {"stop", "length"}, "the test shows less than it says"
    without = ask(verifier, requests, capture=False)
    assert {place: answer for place, (answer, _) in without.items()} == {
        place: answer for place, (answer, _) in found.items()
    }


def test_states_that_come_with_answers_are_those_of_a_fresh_pass(verifier: Loaded) -> None:
    """In float32 to rounding: that of the last token too, which nothing in decoding needs."""
    requests = requests_of(12)
    for place, (answer, states) in ask(verifier, requests).items():
        ids = [*requests[place].prompt, *answer.token_ids]
        with torch.inference_mode():
            fresh = verifier.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        assert states is not None
        torch.testing.assert_close(states, fresh, atol=2e-4, rtol=2e-3)


def test_a_pass_over_many_rows_is_that_over_each(verifier: Loaded) -> None:
    rows = [list(request.prompt) for request in requests_of(15)]
    done: list[int] = []
    together = forward_states(verifier, rows, 64, done.append)
    assert sum(done) == sum(map(len, rows)) and len(done) > 3
    for row, states in zip(rows, together, strict=True):
        (alone,) = forward_states(verifier, [row], 1)
        torch.testing.assert_close(states, alone, atol=2e-4, rtol=2e-3)


def test_own_share_counts_what_the_verifier_would_have_said(verifier: Loaded) -> None:
    requests = requests_of(6)
    rows = []
    for place, (answer, _) in ask(verifier, requests).items():
        ids = [*requests[place].prompt, *answer.token_ids]
        rows.append((ids, [(len(requests[place].prompt), len(ids))]))
    assert own_share(verifier, rows, 128) > 0.99
    changed = [([*ids[:-1], (ids[-1] + 1) % VOCAB], spans) for ids, spans in rows]
    supervised = sum(end - begin for _, ((begin, end),) in changed)
    assert own_share(verifier, changed, 128) == pytest.approx(1 - 6 / supervised, abs=0.01)


def test_sampling_is_the_rows_own(verifier: Loaded) -> None:
    """Whatever else is in the batch, and whatever order requests have."""
    requests = requests_of(16)
    sampling = {"temperature": 1.0, "top_p": 0.95}
    found = ask(verifier, requests, batch=16, **sampling)
    backwards = ask(verifier, requests[::-1], batch=3, **sampling)
    same = [found[place][0] == backwards[15 - place][0] for place in range(16)]
    assert sum(same) >= 15  # a draw may fall on the edge between two tokens
    assert len({answer.token_ids[:5] for answer, _ in found.values()}) > 8


def test_choices_follow_their_probabilities() -> None:
    """Against the distribution itself: 20,000 draws, each share within 5 of its standard deviations."""
    logits = torch.tensor([[0.3, 2.0, -1.0, 1.2, 0.0, 1.9]])
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    many = logits.expand(20_000, -1)
    for sampling, allowed in (
        (SamplingConfig(temperature=0.7), {0, 1, 2, 3, 4, 5}),
        (SamplingConfig(temperature=1.0, top_k=3), {1, 5, 3}),
        (SamplingConfig(temperature=1.0, top_p=0.6), {1, 5}),
        (SamplingConfig(temperature=0.5, top_k=4, top_p=0.99), {1, 5, 3, 0}),
        (SamplingConfig(temperature=1.0, top_p=0.01), {1}),
    ):
        shares = (logits[0] / sampling.temperature).softmax(-1)
        shares = torch.tensor([float(share) if token in allowed else 0.0 for token, share in enumerate(shares)])
        expected = shares / shares.sum()
        counts = torch.bincount(choose(many, sampling, uniforms), minlength=6) / 20_000
        deviation = (expected * (1 - expected) / 20_000).sqrt()
        assert (counts - expected).abs().le(5 * deviation + 1e-9).all(), (sampling, counts, expected)


def test_greedy_is_the_limit_of_sampling() -> None:
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(choose(logits, SamplingConfig(temperature=1e-4), uniforms), logits.argmax(-1))
    assert torch.equal(choose(logits, SamplingConfig(temperature=1.0, top_k=1), uniforms), logits.argmax(-1))


def test_batches_have_every_row_once_and_keep_to_the_budget() -> None:
    lengths = [5, 100, 7, 7, 30, 64, 2, 2, 90, 13]
    made = batches(lengths, 100)
    assert sorted(place for batch in made for place in batch) == list(range(10))
    assert all(len(batch) * max(lengths[place] for place in batch) <= 100 for batch in made)
    assert made[0] == [1]
    assert batches([200, 1], 100) == [[0], [1]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "m", layout="fused")


def test_a_verifier_that_does_not_fit_gives_the_same_states(checkpoint: Path, tmp_path: Path) -> None:
    """Cut down to a quarter of what it takes, and with nothing kept at all: the same to the bit."""
    rows = [list(request.prompt) for request in requests_of(6)]
    whole = load_verifier(checkpoint, tmp_path / "a", offload="auto")
    expected = forward_states(whole, rows, 64)
    assert not whole.offloaded
    limit = open_checkpoint(checkpoint).nbytes // 4
    few = load_verifier(checkpoint, tmp_path / "b", offload="auto", limit=limit)
    none = load_verifier(checkpoint, tmp_path / "c", offload=True)
    for loaded in (few, none):
        assert loaded.offloaded and "layer by layer" in loaded.where
        resident = sum(p.nbytes for p in loaded.model.parameters() if p.device.type != "meta")
        assert resident <= limit
        for found, states in zip(forward_states(loaded, rows, 64), expected, strict=True):
            assert torch.equal(found, states)
    with pytest.raises(DataError, match="for every token it would be read from disk"):
        ask(few, requests_of(2, 8))
    assert len(ask(none, requests_of(2, 8), patient=True)) == 2


def test_a_verifier_that_does_not_fit_is_refused_where_it_may_not_be_offloaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"data\.offload: auto"):
        load_verifier(checkpoint, tmp_path, offload=False, limit=1000)


def test_a_verifier_is_loaded_once(checkpoint: Path, tmp_path: Path) -> None:
    loader = Loader(checkpoint, tmp_path, "auto")
    assert loader.get() is loader.get()


def test_disagreement_tells_rounding_from_another_norm() -> None:
    states = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    assert disagreement(states.bfloat16(), states) < 0.005
    assert disagreement(states.roll(1, 0), states) > 1
    assert disagreement(states * 1.5, states) > 0.4
