"""The verifier answers the prompts itself, and its hidden states are stored: what a head is trained on.

Answers are greedy, and the token ids that were generated are kept, never re-tokenised text. States are those after
the final norm, from one forward pass over prompt and answer. A conversation's split and the choice under
`max_samples` depend on its own content and the seed alone, so both are stable when more data comes.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import DataConfig
from fastmtp.data.prompts import Prompt, read_prompts
from fastmtp.data.store import RowEntry, RowWriter
from fastmtp.data.tokens import encode_prompts
from fastmtp.errors import DataError
from fastmtp.extract import fingerprint
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest, digest_of, run_stage

_MIN_ANSWER = 3  # a row whose answer is shorter gives no second draft to learn


def prepare(model: Path, config: DataConfig, target: Path, reporter: Reporter, *, replace: bool = False) -> Manifest:
    """Prepare training rows of `model` for the prompts of `config` into `target`.

    Raises:
        DataError: no usable prompt, no row left to train on, or no room on the disk.
    """
    rejected: Counter[str] = Counter()
    prompts = _choose(read_prompts(config.prompts, rejected=rejected), config, rejected)
    verifier = fingerprint(open_checkpoint(model))
    return run_stage(
        "prepare", target, config=config.model_dump(), reporter=reporter, replace=replace,
        inputs={"model": verifier, "prompts": digest_of([prompt.key for prompt in prompts])},
        body=lambda directory: _prepare(model, verifier, prompts, config, directory, reporter, rejected),
    )  # fmt: skip


def _choose(prompts: list[Prompt], config: DataConfig, rejected: Counter[str]) -> list[Prompt]:
    """A seeded sample of `max_samples`: those whose hash with the seed is lowest, in file order."""
    if config.max_samples is None or len(prompts) <= config.max_samples:
        return prompts
    ranked = sorted(prompts, key=lambda prompt: _unit_hash(f"sample:{config.seed}", prompt.key))
    chosen = {prompt.key for prompt in ranked[: config.max_samples]}
    rejected["not sampled"] = len(prompts) - len(chosen)
    return [prompt for prompt in prompts if prompt.key in chosen]


def _unit_hash(salt: str, key: str) -> float:
    """A number in [0, 1) that depends on salt and key alone."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{key}".encode()).digest()[:8]) / 2**64


def _prepare(
    model_path: Path,
    verifier: str,
    prompts: list[Prompt],
    config: DataConfig,
    directory: Path,
    reporter: Reporter,
    rejected: Counter[str],
) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    encoded = encode_prompts(tokenizer, prompts)
    rows_in = len(prompts) + rejected.total()
    usable = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) + _MIN_ANSWER > config.max_length:
            rejected["prompt too long"] += 1
        else:
            usable.append((prompt, ids))
    if not usable:
        raise DataError(
            f"{config.prompts}: no prompt fits into {config.max_length} tokens.", mend="Raise data.max_length."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto", device_map=device).eval()
    begun = time.monotonic()
    answers = _answer(model, tokenizer, [ids for _, ids in usable], config, reporter)
    answered_in = time.monotonic() - begun
    rows = []
    for (prompt, ids), (answer, finish) in zip(usable, answers, strict=True):
        if len(answer) < _MIN_ANSWER:
            rejected["answer too short"] += 1
            continue
        split = "holdout" if _unit_hash("split", prompt.key) < config.holdout else "train"
        rows.append((RowEntry(prompt.key, split, len(ids) + len(answer), len(ids), finish), ids + answer))
    if not any(entry.split == "train" for entry, _ in rows):
        raise DataError(f"{config.prompts}: no row is left to train on ({dict(rejected)}).", mend="Give more prompts.")
    _require_room(directory, sum(entry.length for entry, _ in rows), model.config.get_text_config().hidden_size)
    _store_states(model, rows, RowWriter(directory, verifier), config, reporter)
    supervised = sum(entry.length - entry.prompt_length for entry, _ in rows)
    return {
        "rows_in": rows_in,
        "rows": len(rows),
        "rows_holdout": sum(entry.split == "holdout" for entry, _ in rows),
        "rejected": dict(rejected),
        "finish": dict(Counter(entry.finish for entry, _ in rows)),
        "tokens": sum(entry.length for entry, _ in rows),
        "tokens_supervised": supervised,
        "hidden_states": "post_final_norm",
        "answer_tokens_per_second": round(supervised / max(answered_in, 1e-9), 1),
    }


@torch.inference_mode()
def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    config: DataConfig,
    reporter: Reporter,
) -> list[tuple[list[int], str]]:
    """Greedy answers, as (token ids, finish reason), in the order of the prompts; batched by like length."""
    reporter.phase("the verifier answers", len(prompts), "prompts")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: list[tuple[list[int], str]] = [([], "")] * len(prompts)
    ends = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends)
    for begin in range(0, len(order), config.batch_size):
        part = order[begin : begin + config.batch_size]
        width = max(len(prompts[index]) for index in part)
        room = min(config.max_new_tokens, config.max_length - width)
        ids = torch.full((len(part), width), pad)
        attend = torch.zeros_like(ids)
        for line, index in enumerate(part):
            ids[line, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            attend[line, width - len(prompts[index]) :] = 1
        out: Tensor = model.generate(  # type: ignore[operator]
            input_ids=ids.to(model.device), attention_mask=attend.to(model.device), do_sample=False,
            max_new_tokens=max(room, _MIN_ANSWER), pad_token_id=pad, eos_token_id=sorted(ends),
            temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        for line, index in enumerate(part):
            answers[index] = _until_end(out[line, width:].tolist(), ends)
        reporter.advance(begin + len(part))
    return answers


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends an answer, by the generation config or else the tokenizer."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else {int(ends)}


def _until_end(ids: list[int], ends: set[int]) -> tuple[list[int], str]:
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1], "stop"
    return ids, "length"


@torch.inference_mode()
def _store_states(
    model: PreTrainedModel,
    rows: Sequence[tuple[RowEntry, list[int]]],
    writer: RowWriter,
    config: DataConfig,
    reporter: Reporter,
) -> None:
    """One forward pass over each row, batched by like length; padding stands on the right, where nothing real looks."""
    total = sum(entry.length for entry, _ in rows)
    reporter.phase("storing its hidden states", total, "tokens")
    order = sorted(range(len(rows)), key=lambda index: rows[index][0].length)
    base = model.base_model
    done = 0
    for begin in range(0, len(order), config.batch_size):
        part = [rows[index] for index in order[begin : begin + config.batch_size]]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for _, ids in part], batch_first=True)
        # The base model's last state is after the final norm, and without the output head no logits are made.
        hidden: Tensor = base(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
        for line, (entry, row) in enumerate(part):
            writer.add(entry, torch.tensor(row), hidden[line, : entry.length].cpu())
            done += entry.length
        reporter.advance(done)
    writer.close()


def _require_room(directory: Path, tokens: int, hidden_size: int) -> None:
    needed = tokens * (hidden_size * 2 + 5)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise DataError(
            f"The hidden states need {needed} bytes (tokens x hidden size x 2); {directory.parent} has {free} free.",
            mend="Lower data.max_samples, or use another disk.",
        )
