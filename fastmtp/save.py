"""Write a small model with its MTP head the way released checkpoints are: bf16, shards, index, experts one by one.

Only for checkpoints that the project makes itself; `fastmtp.stitch` puts a head into somebody else's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastmtp.checkpoint import CONFIG, INDEX
from fastmtp.families.base import Layout
from fastmtp.head import MTPHead, to_native

SHARD_BYTES = 2_000_000


def save_checkpoint(
    directory: Path,
    model: PreTrainedModel,
    head: MTPHead,
    tokenizer: PreTrainedTokenizerBase,
    *,
    layout: Layout = "split",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model, head (experts in `layout`), config, generation config and tokenizer into `directory`."""
    extra = {name: getattr(model.config, name) for name in ("num_nextn_predict_layers",) if hasattr(model.config, name)}
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
        path.unlink()
    (directory / INDEX).unlink(missing_ok=True)
    native = to_native(head.state_dict(), model.config.to_dict(), layout)
    tensors.update({key: value.detach().to(torch.bfloat16) for key, value in native.items()})
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes)
    for name, keys in split.filename_to_tensors.items():
        save_file({key: tensors[key].contiguous() for key in keys}, directory / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8")) | extra
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(directory)
