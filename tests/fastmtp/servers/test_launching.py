"""vLLM's command line, a function of the job alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastmtp.config import EvaluateConfig
from fastmtp.errors import InputError
from fastmtp.servers.launching import SERVED_NAME, Launch, server_environment, vllm_python

LAUNCH = Launch(checkpoint=Path("/models/eagle-of-mine"), max_model_len=512)
PYTHON = Path("/venv/bin/python")


def command(launch: Launch, *, gpu: bool = False) -> list[str]:
    return launch.command(PYTHON, 8000, gpu=gpu)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_method_and_k_always_stand_in_the_command() -> None:
    """Case V5: never guessed by vLLM from a folder's name, which is no name it is served by either."""
    words = command(LAUNCH)
    assert json.loads(after(words, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 3}
    assert after(words, "--served-model-name") == SERVED_NAME == "checkpoint"
    assert after(words, "--per-request-spec-decode-metrics") == "summary"
    assert after(words, "--host") == "127.0.0.1" and after(words, "--port") == "8000"


def test_without_speculation() -> None:
    words = command(Launch(checkpoint=Path("/m"), max_model_len=512, num_speculative_tokens=None))
    assert "--speculative-config" not in words and "--per-request-spec-decode-metrics" not in words


def test_prefix_caching_is_off_unless_it_is_asked_for() -> None:
    """Case V2."""
    assert "--no-enable-prefix-caching" in command(LAUNCH)
    config = EvaluateConfig(prompts="x", prefix_caching=True)
    words = command(Launch.of(config, Path("/m"), 512, 3))
    assert "--enable-prefix-caching" in words and "--no-enable-prefix-caching" not in words


def test_eager_mode_only_where_it_is_needed_or_given() -> None:
    assert "--enforce-eager" in command(LAUNCH) and "--enforce-eager" not in command(LAUNCH, gpu=True)
    given = Launch(checkpoint=Path("/m"), max_model_len=512, server_args=("--enforce-eager",))
    assert "--enforce-eager" in command(given, gpu=True)


def test_the_jobs_own_arguments_come_last() -> None:
    config = EvaluateConfig(
        prompts="x", concurrency=8, dtype="float16", draft_sampling="probabilistic",
        server_args=("--tensor-parallel-size", "8"),
    )  # fmt: skip
    words = command(Launch.of(config, Path("/m"), 700, 5), gpu=True)
    assert words[-2:] == ["--tensor-parallel-size", "8"]
    assert (after(words, "--dtype"), after(words, "--max-num-seqs"), after(words, "--max-model-len")) == (
        "float16",
        "8",
        "700",
    )
    speculation = json.loads(after(words, "--speculative-config"))
    assert speculation == {"method": "mtp", "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}


def test_the_environment_keeps_the_mark_by_which_strays_are_found() -> None:
    found = server_environment()
    assert found["SPT_NOENV"] == "1" and found["PYTHONPATH"] == "" and found["HF_HUB_OFFLINE"] == "1"


def test_no_environment_is_said_with_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTMTP_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(InputError, match=r"No vLLM environment.*make setup"):
        vllm_python()
