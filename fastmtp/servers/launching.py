"""How vLLM's server is started: which interpreter, which arguments, which environment. Starts nothing itself.

vLLM lives in an environment of its own, since its pins and ours cannot meet; nothing here imports it. The interpreter
is FASTMTP_VLLM_PYTHON, else `.venv-vllm/bin/python` in the working directory or beside this package's source.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fastmtp.config import EvaluateConfig
from fastmtp.errors import InputError

# The file name of a checkpoint tells vLLM nothing, and a user's text in it might: some methods are guessed from names.
SERVED_NAME = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a server is started with.

    Attributes:
        max_model_len: longest prompt and answer, in tokens.
        num_speculative_tokens: draft tokens per step, K; none: no speculation.
        concurrency: most requests it runs at once.
        draft_sampling: how draft tokens are picked at a temperature above 0.
        speculation: more of vLLM's speculative config; it wins over the rest.
        prefix_caching: off unless asked for: with MTP on hybrid models it crashes, or reuses the wrong state.
        server_args: the job's own, last, so that they win.
    """

    checkpoint: Path
    max_model_len: int
    num_speculative_tokens: int | None = 3
    concurrency: int = 64
    dtype: str = "bfloat16"
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    speculation: Mapping[str, object] = field(default_factory=dict)
    prefix_caching: bool = False
    server_args: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, config: EvaluateConfig, checkpoint: Path, max_model_len: int, num_speculative_tokens: int | None
    ) -> Launch:
        """As an evaluation asks for it."""
        return cls(
            checkpoint=checkpoint, max_model_len=max_model_len, num_speculative_tokens=num_speculative_tokens,
            concurrency=config.concurrency, dtype=config.dtype, draft_sampling=config.draft_sampling,
            prefix_caching=config.prefix_caching, server_args=config.server_args,
        )  # fmt: skip

    @property
    def method(self) -> str:
        """How tokens are drafted; none: they are not."""
        return "none" if not self.num_speculative_tokens else str(self.speculation.get("method", "mtp"))

    def command(self, python: Path, port: int, *, gpu: bool) -> list[str]:
        """The command line. A function of its arguments alone."""
        words = [
            # The module is the same server as `vllm serve`, and unlike it also runs from the CPU wheel.
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.checkpoint.resolve()), "--served-model-name", SERVED_NAME,
            "--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype, "--seed", "0",
            "--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.concurrency),
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
        ]  # fmt: skip
        if not gpu:
            # Without it the CPU build compiles for minutes; on a GPU it would cost the speed that is to be measured.
            words.append("--enforce-eager")
        if self.num_speculative_tokens is not None:
            speculation: dict[str, object] = {
                "method": self.method, "num_speculative_tokens": self.num_speculative_tokens, **self.speculation,
            }  # fmt: skip
            if self.draft_sampling != "greedy":
                speculation["draft_sample_method"] = self.draft_sampling
            words += ["--speculative-config", json.dumps(speculation)]
            words += ["--per-request-spec-decode-metrics", "summary"]
        return [*words, *self.server_args]


def vllm_python() -> Path:
    """The interpreter of vLLM's environment. Raises InputError when there is none."""
    named = os.environ.get("FASTMTP_VLLM_PYTHON")
    candidates = [Path(named)] if named else []
    if not named:
        candidates = [Path.cwd(), Path(__file__).resolve().parents[2]]
        candidates = [root / ".venv-vllm" / "bin" / "python" for root in candidates]
    for candidate in candidates:
        if shutil.which(candidate):
            return candidate
    raise InputError(
        f"No vLLM environment: {candidates[0]} is not there.",
        mend="`make setup` makes one; or set FASTMTP_VLLM_PYTHON to the python of yours.",
    )


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA device that vLLM would take."""
    return Path("/dev/nvidiactl").exists()


def server_environment() -> dict[str, str]:
    """What a server's environment has besides ours."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        # Its processes name themselves; without this that overwrites the environment by which strays are found.
        "SPT_NOENV": "1",
        # Ours would put our packages into its interpreter.
        "PYTHONPATH": "",
    }
