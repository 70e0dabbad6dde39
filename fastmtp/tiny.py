"""A small real verifier, made from nothing: architecture, tokenizer, training, and a native head trained for one step.

It is what the demo, the tests and anyone without a GPU try the product on. Everything is of the real kind:
`qwen3_next` layers (gated delta net, full attention, mixture of experts) at sizes that vLLM's CPU kernels accept, a
byte-level BPE tokenizer with a chat template, shards with an index, experts one by one, bf16. Its head is trained for
step 0 only, on the training text, as released ones are; so its later drafts are poor, which is what the product
mends.

Deterministic for a recipe on one machine; the manifest holds the recipe's hash, by which a finished one is found again.
It knows nothing worth knowing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

from fastmtp.data.conversations import Conversation
from fastmtp.data.prompts import read_conversations
from fastmtp.data.rows import PackedRows
from fastmtp.data.wordproblems import generate
from fastmtp.head import MTPHead, head_from_config
from fastmtp.losses import token_losses
from fastmtp.progress import Reporter
from fastmtp.save import save_checkpoint
from fastmtp.stage import Manifest, run_stage, sha256_file

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TRAIN_PROMPTS = "prompts-train.jsonl"
TEST_PROMPTS = "prompts-test.jsonl"


class Recipe(BaseModel):
    """Everything that decides the bytes of a small verifier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, ge=0)
    text_sha256: str | None = Field(None, description="Digest of the given text; None for generated word problems.")
    problems: int = Field(6000, ge=100, description="How many word problems are generated.")
    vocab_size: int = Field(1024, ge=300)
    hidden_size: int = Field(192, ge=64)
    verifier_steps: int = Field(300, ge=1)
    head_steps: int = Field(80, ge=1)
    batch_tokens: int = Field(2048, ge=256)
    max_length: int = Field(320, ge=64, description="Longer texts are left out.")
    verifier_lr: float = 3e-3
    head_lr: float = 2e-3


# On a text of one's own the verifier trains longer: real text is harder than generated problems.
TEXT_DEFAULTS = {"verifier_steps": 1400, "head_steps": 250, "max_length": 512}


def build(target: Path, recipe: Recipe, reporter: Reporter, *, text: Path | None = None) -> Manifest:
    """Make the verifier in `target`, or find that it is there.

    Returns:
        The manifest; its summary holds the number of parameters, the final losses and the prompt files' names.
    """
    inputs = {"text": sha256_file(text)} if text else {}
    return run_stage(
        "tiny-verifier",
        target,
        config=recipe.model_dump(),
        inputs=inputs,
        body=lambda directory: _build(directory, recipe, reporter, text),
        reporter=reporter,
        replace=True,
    )


def _build(directory: Path, recipe: Recipe, reporter: Reporter, text: Path | None) -> dict[str, Any]:
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(2)
    pairs = _pairs(read_conversations(str(text))) if text else generate(recipe.problems, recipe.seed)
    rng = random.Random(recipe.seed)  # noqa: S311
    rng.shuffle(pairs)
    held_out = max(1, min(512, len(pairs) // 10))
    test, train = pairs[:held_out], pairs[held_out:]
    tokenizer = _tokenizer(train, recipe.vocab_size)
    rows = _encode(tokenizer, train, recipe.max_length)
    config = _config(recipe, tokenizer)
    model = Qwen3NextForCausalLM(config)
    verifier_loss = _train_verifier(model, rows, recipe, reporter)
    head = head_from_config(config.to_dict())
    head.initialize(config.initializer_range)
    head_loss = _train_head(model, head, rows, recipe, reporter)
    save_checkpoint(directory, model, head, tokenizer)
    for name, part in ((TRAIN_PROMPTS, train), (TEST_PROMPTS, test)):
        lines = (json.dumps({"question": row["question"], "answer": row["answer"]}) for row in part)
        (directory / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "parameters": sum(p.numel() for p in model.parameters()) + sum(p.numel() for p in head.parameters()),
        "verifier_loss": round(verifier_loss, 4),
        "head_loss": round(head_loss, 4),
        "prompts_train": TRAIN_PROMPTS,
        "prompts_test": TEST_PROMPTS,
    }


def _pairs(conversations: Iterable[Conversation]) -> list[dict[str, str]]:
    """Question and answer of those that have both, each question once."""
    pairs: dict[str, dict[str, str]] = {}
    for one in conversations:
        if answer := one.answer():
            pairs.setdefault(one.prompt_key(), {"question": one.prompt()[-1]["content"], "answer": answer["content"]})
    return list(pairs.values())


def _tokenizer(pairs: Sequence[dict[str, str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with digits apart, as the real families have, so that numbers are spelled."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator((text for row in pairs for text in (row["question"], row["answer"])), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048,  # noqa: S106
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[dict[str, str]], max_length: int) -> list[list[int]]:
    """Whole conversations as token ids, ending after the answer's <|im_end|>."""
    texts = []
    for row in pairs:
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
        texts.append(rendered.rstrip("\n"))
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [ids for ids in encoded if len(ids) <= max_length]


def _config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3NextConfig:
    """Sizes that vLLM's CPU kernels take: linear head dims 128, head_dim 64."""
    hidden = recipe.hidden_size
    config = Qwen3NextConfig(
        vocab_size=recipe.vocab_size, hidden_size=hidden, num_hidden_layers=2, intermediate_size=2 * hidden,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=hidden, shared_expert_intermediate_size=hidden,
        max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    config.num_nextn_predict_layers = 1
    config.dtype = torch.bfloat16
    return config


def _batches(rows: Sequence[list[int]], batch_tokens: int, steps: int, seed: int) -> Iterator[list[list[int]]]:
    """`steps` batches of rows of like length, about `batch_tokens` each, in a seeded order, over several passes."""
    rng = random.Random(seed)  # noqa: S311
    given = 0
    while given < steps:
        order = sorted(rng.sample(rows, len(rows)), key=len)
        batches: list[list[list[int]]] = [[]]
        for row in order:
            if batches[-1] and (len(batches[-1]) + 1) * len(row) > batch_tokens:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        for batch in batches[: steps - given]:
            yield batch
            given += 1


def _padded(batch: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows -> ids [B, T] int64 and mask [B, T] bool."""
    width = max(len(row) for row in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.int64)
    mask = torch.zeros((len(batch), width), dtype=torch.bool)
    for index, row in enumerate(batch):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = True
    return ids, mask


def _schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=steps, pct_start=0.1, cycle_momentum=False
    )


def _train_verifier(
    model: Qwen3NextForCausalLM, rows: Sequence[list[int]], recipe: Recipe, reporter: Reporter
) -> float:
    def loss_of(batch: list[list[int]]) -> torch.Tensor:
        ids, mask = _padded(batch)
        # Right padding under a causal model needs no attention mask: nothing real looks at it.
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        counted = mask[:, 1:]
        return F.cross_entropy(model.lm_head(hidden[:, :-1][counted]), ids[:, 1:][counted])

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.verifier_lr, weight_decay=0.01)
    batches = _batches(rows, recipe.batch_tokens, recipe.verifier_steps, recipe.seed)
    reporter.phase("training the verifier", recipe.verifier_steps, "steps")
    return _fit(optimizer, recipe.verifier_steps, batches, loss_of, reporter)


def _train_head(
    model: Qwen3NextForCausalLM, head: MTPHead, rows: Sequence[list[int]], recipe: Recipe, reporter: Reporter
) -> float:
    """Step 0 only, on the training text, as native heads are trained: the later steps never see their own output."""

    def loss_of(batch: list[list[int]]) -> torch.Tensor:
        ids, mask = _padded(batch)
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        lengths = tuple(len(row) for row in batch)
        packed = PackedRows(ids[mask], hidden[mask], torch.ones(sum(lengths), dtype=torch.bool), lengths)
        counted = packed.counted(0)
        (output,) = head.serving(packed, model.model.embed_tokens.weight, 1, counted)
        targets = packed.input_ids[output.origins + 2]
        return token_losses(output.states, model.lm_head.weight, targets).total / len(targets)

    model.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.head_lr, weight_decay=0.0)
    batches = _batches(rows, recipe.batch_tokens, recipe.head_steps, recipe.seed + 1)
    reporter.phase("training its native head for one step", recipe.head_steps, "steps")
    return _fit(optimizer, recipe.head_steps, batches, loss_of, reporter)


def _fit(
    optimizer: torch.optim.Optimizer,
    steps: int,
    batches: Iterable[list[list[int]]],
    loss_of: Callable[[list[list[int]]], torch.Tensor],
    reporter: Reporter,
) -> float:
    """Train on every batch, the rate rising and falling once. Returns the smoothed loss at the end."""
    schedule = _schedule(optimizer, steps)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    smooth = 0.0
    for step, batch in enumerate(batches, start=1):
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        smooth = value if step == 1 else 0.95 * smooth + 0.05 * value
        reporter.advance(step, note=f"loss {smooth:.3f}")
    return smooth
