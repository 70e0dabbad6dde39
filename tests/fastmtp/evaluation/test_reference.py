"""The cross-check without vLLM: the same as walking row by row, for every K from one pass; an alarm where it parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastmtp.acceptance import Walk
from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import TrainConfig
from fastmtp.data.rows import PackedRows
from fastmtp.evaluation.reference import DEPTH, Answered, reference
from fastmtp.evaluation.report import Head
from fastmtp.extract import extract
from fastmtp.progress import Reporter
from fastmtp.protocol import Measurement
from fastmtp.training.headfiles import HeadFiles
from tests.fastmtp.fixtures import write_checkpoint

QUIET = Reporter("evaluate", quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says one of two tokens, by the sign of one projection, so that a random head often drafts the right one."""
    place = write_checkpoint(tmp_path_factory.mktemp("reference") / "model", "qwen3.5")
    for path in place.glob("*.safetensors"):
        tensors = load_file(path)
        if "lm_head.weight" in tensors:
            row = tensors["lm_head.weight"][5].clone()
            tensors["lm_head.weight"].zero_()
            tensors["lm_head.weight"][5], tensors["lm_head.weight"][9] = row, -row
            save_file(tensors, path, {"format": "pt"})
            return place
    raise AssertionError("no output head of its own")


@pytest.fixture(scope="module")
def answers(model: Path) -> list[Answered]:
    """Greedy, as the walk takes them to be, of different lengths; the last prompt twice."""
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    found: list[Answered] = []
    for number, length in enumerate((9, 14, 5, 5)):
        prompt = [3 + number % 3, 7, 11][: 2 + number % 2]
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(length):
                ids = torch.cat([ids, verifier(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        found.append((tuple(prompt), tuple(ids[0, len(prompt) :].tolist())))
    return [*found, found[-1]]


@torch.inference_mode()
def row_by_row(model: Path, head: Path, answers: list[Answered], steps: int) -> Measurement:
    """The plain way: each row by itself, a pass for this K alone."""
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    objective = HeadFiles(open_checkpoint(model), head).objective(TrainConfig(num_steps=steps), torch.device("cpu"))
    walk = Walk(steps)
    for prompt, answer in answers:
        ids = torch.tensor([*prompt, *answer])
        states = verifier.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        _, hits = objective(PackedRows.pack([(ids, states.float(), torch.arange(len(ids)) >= len(prompt))]))
        walk.add(hits.tolist(), len(prompt) - 1, len(ids))
    return walk.measurement()


def test_one_pass_walks_for_every_k(model: Path, answers: list[Answered], tmp_path: Path) -> None:
    extract(model, tmp_path / "head", QUIET)
    heads: dict[Head, Path] = {"base": model, "tuned": model}
    counted = {("base", "p"): row_by_row(model, tmp_path / "head", answers, 3)}
    found = reference(model, heads, {("base", "p"): answers, ("tuned", "p"): answers[:2]}, counted, 3, QUIET)
    base, tuned = found.walks
    assert 0.1 < base.walked.acceptance[2] < base.walked.acceptance[0] < 1
    assert (base.head, base.set, base.counted, tuned.counted) == ("base", "p", counted["base", "p"], None)
    assert base.walked == counted["base", "p"] and base.apart == [0.0] * 3 and not found.alarm
    assert tuned.walked == row_by_row(model, tmp_path / "head", answers[:2], 3)
    assert set(base.lengths) == set(range(1, DEPTH + 1))
    for steps, length in base.lengths.items():
        assert length == row_by_row(model, tmp_path / "head", answers, steps).mean_acceptance_length


def test_parting_from_vllm_is_an_alarm(model: Path, answers: list[Answered]) -> None:
    off = Measurement(acceptance=[0.5, 0.5, 0.5], mean_acceptance_length=2.5, drafts=10)
    found = reference(model, {"base": model}, {("base", "p"): answers}, {("base", "p"): off}, 3, QUIET)
    assert found.alarm and found.walks[0].alarm
    assert found.walks[0].apart[0] == pytest.approx(found.walks[0].walked.acceptance[0] - 0.5)
