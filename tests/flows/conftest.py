"""What the tests of the flows share: a stub in the place of the fastmtp command, and jobs that tell it what to do."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastmtp.config import JobSpec
from flows.finetune import WORK_DIR_VARIABLE
from flows.tasks import COMMAND_VARIABLE

STUB = Path(__file__).with_name("stub_fastmtp.py")


@pytest.fixture
def stub_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment under which flows run the stub, in this process and in those that are given it."""
    env = {
        COMMAND_VARIABLE: shlex.join([sys.executable, str(STUB)]),
        WORK_DIR_VARIABLE: str(tmp_path / "jobs"),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[[str], JobSpec]:
    """A job for the stub, by what its model should do: `make_job("bad-train")`."""

    def make(plan: str) -> JobSpec:
        return JobSpec.parse(
            {
                "model": f"stub:{plan}",
                "data": {"prompts": "train.jsonl"},
                "evaluate": {"prompts": "test.jsonl"},
                "publish": {"uri": f"file://{tmp_path}/published/"},
            }
        )

    return make
