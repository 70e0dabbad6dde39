"""Who answers: decided from the job and from what this machine has, and said with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fastmtp.config import DataConfig
from fastmtp.data.answers import Engine
from fastmtp.data.engines.loading import Loader
from fastmtp.data.engines.local import LocalEngine
from fastmtp.data.engines.served import vllm_engine
from fastmtp.data.rendering import Renderer
from fastmtp.errors import InputError
from fastmtp.serving import vllm_python


@dataclass(frozen=True)
class Backend:
    """An engine that is not started yet, and why it is the one."""

    name: Literal["transformers", "vllm"]
    why: str
    config: DataConfig

    @contextlib.contextmanager
    def open(self, loader: Loader, renderer: Renderer, directory: Path) -> Iterator[Engine]:
        """Yield the engine; vLLM starts when it is asked first, and ends on leaving.

        Args:
            directory: for vLLM's log.
        """
        if self.name == "vllm":
            with vllm_engine(loader.path, renderer.tokenizer, self.config, directory) as engine:
                yield engine
            return
        pad = renderer.tokenizer.pad_token_id
        yield LocalEngine(
            loader.get, ends=set(renderer.ends), pad=min(renderer.ends) if pad is None else int(pad),
            sampling=self.config.sampling, batch_size=self.config.batch_size,
            capture=self.config.hidden_states == "stored", patient=self.config.offload is True,
        )  # fmt: skip


def choose(config: DataConfig) -> Backend:
    """The backend of a job. Raises InputError when vLLM is wanted and has no environment."""
    if config.server:
        return Backend("vllm", f"data.server names {config.server}", config)
    if config.backend == "vllm":
        vllm_python()
        return Backend("vllm", "data.backend says so", config)
    if config.backend == "transformers":
        return Backend("transformers", "data.backend says so", config)
    if not torch.cuda.is_available():
        return Backend("transformers", "there is no GPU", config)
    try:
        vllm_python()
    except InputError:
        return Backend("transformers", "there is a GPU, but no vLLM environment", config)
    return Backend("vllm", "there is a GPU", config)
