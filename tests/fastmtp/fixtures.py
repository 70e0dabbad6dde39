"""Small checkpoints with random weights, of every family and layout, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from fastmtp.families.base import Layout
from fastmtp.head import MTPHead, head_from_config
from fastmtp.save import save_checkpoint
from fastmtp.tiny import CHAT_TEMPLATE

VOCAB = 64
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "tie_word_embeddings": False, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4,
    "spatial_merge_size": 1, "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
MODEL_TYPES = {"qwen3-next": "qwen3_next", "qwen3.5": "qwen3_5_text", "qwen3.5-moe": "qwen3_5_moe_text"}


def config_dict(family: str) -> dict[str, Any]:
    """config.json of a small model of a family, its head declared."""
    model_type = MODEL_TYPES[family]
    sizes = SIZES if family == "qwen3.5" else SIZES | EXPERTS
    config = AutoConfig.for_model(model_type, **sizes).to_dict()
    config["num_nextn_predict_layers" if family == "qwen3-next" else "mtp_num_hidden_layers"] = 1
    return config


def random_head(family: str, seed: int = 0) -> MTPHead:
    """A head with random weights, large enough to matter, norms included."""
    torch.manual_seed(seed)
    head = head_from_config(config_dict(family))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a chat template."""
    letters = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz0123456789 .,\n?+*-=_"]
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, [], unk_token="."))
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>", unk_token=".")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHAT_TEMPLATE
    return made


def write_checkpoint(
    directory: Path, family: str = "qwen3-next", layout: Layout = "split", seed: int = 0, *, wrapped: bool = False
) -> Path:
    """A whole small checkpoint: model, head, tokenizer, several shards; `wrapped`: as part of a multimodal model."""
    torch.manual_seed(seed)
    config = config_dict(family)
    model_type = config["model_type"] if wrapped else config.pop("model_type")
    if wrapped:
        kind = model_type.removesuffix("_text")
        whole = AutoConfig.for_model(kind, text_config=config, vision_config=VISION, tie_word_embeddings=False)
        model = AutoModelForImageTextToText.from_config(whole)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
        model.config.num_nextn_predict_layers = 1
    directory.mkdir(parents=True, exist_ok=True)
    save_checkpoint(directory, model, random_head(family, seed), tokenizer(), layout=layout, shard_bytes=12_000)
    return directory
