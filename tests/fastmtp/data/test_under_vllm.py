"""Rows that a real vLLM answers, its native head drafting: by a server of ours, and by the same one under its URL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import DataConfig, SamplingConfig
from fastmtp.data.engines import served
from fastmtp.data.prepare import prepare
from fastmtp.data.shards import Verifier
from fastmtp.data.states import disagreement
from fastmtp.data.store import RowStore
from fastmtp.progress import Reporter
from fastmtp.serving import Answer, Launch, Request, Server, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_stored_ids_are_those_that_the_server_returned(
    half_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D4, with many requests on their way at once. The tap sees every answer as it comes over the wire."""
    returned: list[dict[tuple[int, ...], tuple[int, ...]]] = []
    drafts: list[int] = []
    generate = Server.generate

    def tapped(
        self: Server, requests: Sequence[Request], sampling: SamplingConfig, concurrency: int,
        on_answer: Callable[[int, Answer], None],
    ) -> list[Answer]:  # fmt: skip
        answers = generate(self, requests, sampling, concurrency, on_answer)
        asked = [tuple(request.prompt) for request in requests]
        returned.append(dict(zip(asked, (answer.token_ids for answer in answers), strict=True)))
        drafts.append(self.counters().drafts)
        return answers

    @contextlib.contextmanager
    def started(launch: Launch, log: Path) -> Iterator[Server]:
        with serve(launch, log) as server:
            yield server
            # While the server of the first run is still there, it answers a second one by its URL.
            run(half_trained, tmp_path / "again", server=server.url, backend="auto")

    monkeypatch.setattr(Server, "generate", tapped)
    monkeypatch.setattr(served, "serve", started)
    run(half_trained, tmp_path / "d", backend="vllm")
    assert len(drafts) == 2 and 0 < drafts[0] < drafts[1]
    verifier = AutoModelForCausalLM.from_pretrained(half_trained, dtype="auto").eval()
    for name, answers in zip(("d", "again"), returned, strict=True):
        store = RowStore(tmp_path / name, Verifier.of(open_checkpoint(half_trained)))
        stored = {}
        for entry in store.entries:
            ids, hidden, _ = store.row(entry)
            stored[tuple(ids[: entry.prompt_length].tolist())] = tuple(ids[entry.prompt_length :].tolist())
            with torch.inference_mode():
                fresh = verifier.base_model(input_ids=ids[None]).last_hidden_state[0]
            assert disagreement(hidden, fresh) < 0.02
        assert stored == answers and len(stored) == 24


def run(model: Path, target: Path, **changes: object) -> None:
    config = DataConfig.model_validate(
        {
            "prompts": str(model / "prompts-train.jsonl"), "max_samples": 24, "max_length": 256, "max_new_tokens": 48,
            "concurrency": 12, **changes,
        }
    )  # fmt: skip
    summary = prepare(model, config, target, Reporter("prepare", quiet=True)).summary
    assert summary["backend"] == "vllm" and summary["own_share"] > 0.95
    assert summary["rows_answered"] == summary["rows"] == 24
