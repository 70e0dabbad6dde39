"""The small verifier is of the real kind, the same for the same recipe, and made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastmtp.checkpoint import INDEX, open_checkpoint
from fastmtp.native import find_head
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest
from fastmtp.tiny import TEST_PROMPTS, TRAIN_PROMPTS, Recipe, build

QUICK = Recipe(verifier_steps=3, head_steps=2, problems=300, batch_tokens=512)


def make(target: Path, recipe: Recipe = QUICK, text: Path | None = None) -> Manifest:
    return build(target, recipe, Reporter("preflight", quiet=True), text=text)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tiny") / "t"
    make(target)
    return target


def test_it_is_saved_like_real_ones(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    assert checkpoint.config["model_type"] == "qwen3_next"
    assert checkpoint.config["num_nextn_predict_layers"] == 1
    assert checkpoint.config["layer_types"] == ["linear_attention", "full_attention"]
    assert len(checkpoint.shards) >= 3 and (made / INDEX).is_file()
    assert {entry.dtype for entry in checkpoint.tensors.values()} == {"BF16"}
    head = find_head(checkpoint)
    assert head.layout == "split" and "mtp.layers.0.mlp.experts.3.down_proj.weight" in head.tensors
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in checkpoint.tensors
    index = json.loads((made / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in checkpoint.tensors.values())


def test_transformers_loads_it_and_its_tokenizer(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 23 = ?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1 + 23 = ?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode(i) for i in tokenizer("123")["input_ids"]] == ["1", "2", "3"]
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_prompts_for_training_and_testing_do_not_meet(made: Path) -> None:
    train, test = ((made / name).read_text().splitlines() for name in (TRAIN_PROMPTS, TEST_PROMPTS))
    assert len(train) + len(test) == QUICK.problems
    assert not set(train) & set(test)


def test_same_recipe_same_bytes_and_a_seed_changes_them(made: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again")
    assert again.files == make(made).files  # found, not made
    other = make(tmp_path / "other", QUICK.model_copy(update={"seed": 1}))
    assert other.files["model-00001-of-00003.safetensors"] != again.files["model-00001-of-00003.safetensors"]


def test_on_a_text_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    rows = [{"question": f"what is {n} plus {n}?", "answer": f"{n} + {n} = {2 * n}"} for n in range(200)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    summary = make(tmp_path / "t", QUICK.model_copy(update={"text_sha256": "x", "vocab_size": 320}), file).summary
    assert summary["parameters"] > 1_000_000
    assert (tmp_path / "t" / TRAIN_PROMPTS).read_text().count("plus") == 180
