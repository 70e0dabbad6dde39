"""From files to the objective, and from tuned weights to a head like the one that went in."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastmtp.checkpoint import CONFIG, Checkpoint
from fastmtp.config import TrainConfig
from fastmtp.errors import CheckpointError
from fastmtp.extract import HEAD_FILE
from fastmtp.head import from_native, head_from_config, load_native, to_native
from fastmtp.headers import TensorEntry
from fastmtp.native import find_head
from fastmtp.training.objective import Objective

_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class HeadFiles:
    """The head as it came and the verifier it is of.

    Attributes:
        before: the head's tensors in fp32, by their names in the module.
    """

    def __init__(self, checkpoint: Checkpoint, head: Path) -> None:
        self._checkpoint, self._directory = checkpoint, head
        self._info = find_head(checkpoint)
        self.native = load_file(head / HEAD_FILE)
        self.before = {key: value.float() for key, value in from_native(self.native, checkpoint.config).items()}

    @property
    def parameters(self) -> int:
        """Weights of the head."""
        return sum(tensor.numel() for tensor in self.before.values())

    @property
    def shared(self) -> int:
        """Elements of the verifier's embedding and output head, once when they are tied."""
        entries = {self._info.embedding.key: self._info.embedding, self._info.output.key: self._info.output}
        return sum(torch.Size(entry.shape).numel() for entry in entries.values())

    @property
    def vocabulary(self) -> int:
        return self._info.output.shape[0]

    def objective(self, config: TrainConfig, device: torch.device) -> Objective:
        """The head, in fp32, beside the verifier's embedding and output head in the compute type."""
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        head = head_from_config(self._checkpoint.config)
        load_native(head, self.native, self._checkpoint.config)
        embedding = self._tensor(self._info.embedding).to(device, dtype)
        tied = self._info.output == self._info.embedding
        output = embedding if tied else self._tensor(self._info.output).to(device, dtype)
        return Objective(head, embedding, output, config)

    def stored(self, tuned: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tuned weights under the native names and in the types of the head that went in. What is not trained, such as
        copies of the embedding that some families repeat in the head, is as it was."""
        made = to_native({**self.before, **tuned}, self._checkpoint.config, self._info.layout)
        return {key: made[key].to(value.dtype) if key in made else value for key, value in self.native.items()}

    def write(self, stored: Mapping[str, Tensor], directory: Path) -> None:
        """Write a head like the result of extract."""
        save_file({key: value.contiguous() for key, value in stored.items()}, directory / HEAD_FILE, {"format": "pt"})
        (directory / HEAD_FILE).chmod(0o644)  # safetensors makes files that only their owner reads
        shutil.copyfile(self._directory / CONFIG, directory / CONFIG)

    def _tensor(self, entry: TensorEntry) -> Tensor:
        if entry.dtype not in _TYPES:
            raise CheckpointError(
                f"{entry.key} is stored as {entry.dtype}; training needs BF16, F16 or F32.",
                mend="Take the original checkpoint, not a quantised one.",
                pointer="/model",
            )
        data = bytearray()
        for block in self._checkpoint.blocks(entry):
            data += block
        return torch.frombuffer(data, dtype=_TYPES[entry.dtype]).view(entry.shape)
