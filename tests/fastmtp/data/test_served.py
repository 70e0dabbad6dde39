"""Answers by vLLM: what is refused of a server that is named, and who answers, decided without starting anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from fastmtp.config import DataConfig
from fastmtp.data.engines.choosing import choose
from fastmtp.data.engines.served import vllm_engine
from fastmtp.data.prepare import prepare
from fastmtp.data.rendering import Renderer
from fastmtp.errors import DataError, InputError
from fastmtp.progress import Reporter
from fastmtp.servers.client import Answer, Request
from tests.fastmtp.fixtures import write_checkpoint


@dataclass
class Fake:
    """A server that speaks as much of vLLM's HTTP as an engine needs, with the tokenizer of a model."""

    renderer: Renderer
    max_model_len: int = 128
    shift: int = 0  # added to each token that it makes of a text
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": "anything", "root": "/elsewhere", "max_model_len": self.max_model_len}]}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.renderer.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        return {"tokens": [token + self.shift for token in ids]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        ids = [3 + (body.get("seed", 0) + place) % 20 for place in range(min(5, body["max_tokens"]))]
        return {"choices": [{"token_ids": ids, "finish_reason": "length"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def fake(model: Path) -> Iterator[Fake]:
    found = Fake(Renderer.of(model))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({"version": "0.32.0"} if self.path == "/version" else found.models())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(found.tokenize(body) if self.path == "/tokenize" else found.complete(body))

        def _reply(self, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        request_queue_size = 64
        daemon_threads = True

    with Listening(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        yield found
        server.shutdown()


def config_for(fake: Fake, **changes: object) -> DataConfig:
    values: dict[str, object] = {"prompts": "p.jsonl", "server": fake.url, "max_length": 100, "concurrency": 4}
    return DataConfig.model_validate(values | changes)


def ask(fake: Fake, model: Path, config: DataConfig, requests: list[Request], place: Path) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    with vllm_engine(model, fake.renderer.tokenizer, config, place) as engine:
        engine.start()
        engine.answer(requests, lambda place, answer, _states: found.__setitem__(place, answer))
    return found


def test_each_row_is_asked_with_its_own_room_and_seed(fake: Fake, model: Path, tmp_path: Path) -> None:
    requests = [Request((5, 6, 7 + n), 20 + n, seed=100 + n) for n in range(12)]
    config = config_for(fake, sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 30})
    found = ask(fake, model, config, requests, tmp_path)
    assert sorted(found) == list(range(12))
    by_prompt = {tuple(body["prompt"]): body for body in fake.asked}
    for place, request in enumerate(requests):
        body = by_prompt[tuple(request.prompt)]
        assert (body["max_tokens"], body["seed"]) == (20 + place, 100 + place)
        assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 30)
        assert found[place].token_ids == tuple(3 + (100 + place + n) % 20 for n in range(5))


def test_a_server_with_less_room_is_refused(fake: Fake, model: Path, tmp_path: Path) -> None:
    fake.max_model_len = 99
    with pytest.raises(InputError, match="takes 99 tokens, rows here have up to 100"):
        ask(fake, model, config_for(fake), [Request((5, 6), 9)], tmp_path)
    assert not fake.asked


def test_a_server_of_another_vocabulary_is_refused(fake: Fake, model: Path, tmp_path: Path) -> None:
    fake.shift = 1
    with pytest.raises(InputError, match="serves /elsewhere, whose tokens are not this model's"):
        ask(fake, model, config_for(fake), [Request((5, 6), 9)], tmp_path)
    assert not fake.asked


def test_answers_of_another_model_are_refused(fake: Fake, model: Path, tmp_path: Path) -> None:
    """Case D4's kind: same tokens, same room, other weights. What it says is not what the verifier says."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(20)))
    config = config_for(fake, prompts=str(prompts), max_new_tokens=20)
    with pytest.raises(DataError, match="Only .*% of the tokens that vLLM answered are what"):
        prepare(model, config, tmp_path / "d", Reporter("prepare", quiet=True))
    assert len(fake.asked) == 20 and not (tmp_path / "d").exists()


def test_who_answers_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**changes: object) -> tuple[str, str]:
        backend = choose(DataConfig.model_validate({"prompts": "p.jsonl"} | changes))
        return backend.name, backend.why

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen() == ("transformers", "there is no GPU")
    assert chosen(server="http://localhost:1")[0] == "vllm"
    assert chosen(backend="transformers") == ("transformers", "data.backend says so")
    monkeypatch.setattr("fastmtp.data.engines.choosing.vllm_python", lambda: Path("python"))
    assert chosen(backend="vllm") == ("vllm", "data.backend says so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen() == ("vllm", "there is a GPU")

    def none() -> Path:
        raise InputError("No vLLM environment.")

    monkeypatch.setattr("fastmtp.data.engines.choosing.vllm_python", none)
    assert chosen() == ("transformers", "there is a GPU, but no vLLM environment")
    with pytest.raises(InputError, match="No vLLM environment"):
        chosen(backend="vllm")
