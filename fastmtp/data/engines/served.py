"""Answers by vLLM: a server of ours, or one that runs already, with many requests on their way at once.

A server that is named might serve anything: before it is asked its tokens and its room are compared with ours, and
afterwards what it said with what the verifier says (`fastmtp.data.states`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from transformers import PreTrainedTokenizerBase

from fastmtp.config import DataConfig
from fastmtp.data.answers import OnAnswer
from fastmtp.errors import InputError
from fastmtp.servers.client import Request
from fastmtp.serving import Launch, Server, connect, serve

_DRAFT_TOKENS = 3


class ServedEngine:
    """vLLM; a server of ours starts when it is first asked.

    Args:
        log: of a server of ours.
        started: keeps that server until it is left.
    """

    def __init__(
        self,
        model: Path,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        log: Path,
        started: contextlib.ExitStack,
    ) -> None:
        self.name = f"vLLM, up to {config.concurrency} at once"
        self._model, self._tokenizer, self._config, self._log, self._started = model, tokenizer, config, log, started
        self._server: Server | None = None
        self._compared = False

    def start(self) -> None:
        """Start a server, or find the one that is named.

        Raises:
            InputError: no vLLM environment, or nothing that serves a model is where the job says.
            ServingError: vLLM did not start.
        """
        config = self._config
        if self._server is not None:
            return
        if config.server:
            self._server = connect(config.server)
            return
        launch = Launch(
            checkpoint=self._model, max_model_len=config.max_length, concurrency=config.concurrency, dtype="auto",
            num_speculative_tokens=_DRAFT_TOKENS if config.speculate else None, server_args=config.server_args,
        )  # fmt: skip
        self._server = self._started.enter_context(serve(launch, self._log))

    def answer(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        """Answer all.

        Raises:
            InputError: the server that is named serves something else.
            ServingError: vLLM refused a prompt, or died.
        """
        assert self._server is not None
        if self._config.server and not self._compared:
            require_same(self._server, self._tokenizer, requests[0].prompt, self._config.max_length)
            self._compared = True
        self._server.generate(
            requests, self._config.sampling, self._config.concurrency,
            lambda place, answer: on_answer(place, answer, None),
        )  # fmt: skip


@contextlib.contextmanager
def vllm_engine(
    model: Path, tokenizer: PreTrainedTokenizerBase, config: DataConfig, directory: Path
) -> Iterator[ServedEngine]:
    """Yield an engine; what it started ends on leaving. Its log lies in `directory` until the stage is done."""
    with contextlib.ExitStack() as started:
        yield ServedEngine(model, tokenizer, config, directory / "vllm.log", started)


def require_same(server: Server, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], longest: int) -> None:
    """Raise InputError where a server that runs already cannot be one of this model, as far as it tells.

    Compared: how many tokens it takes, and its tokens of a prompt's text, since another vocabulary makes others.
    """
    found = next(one for one in json.loads(server.get("/v1/models"))["data"] if one["id"] == server.model)
    room = found.get("max_model_len")
    if room is not None and room < longest:
        raise InputError(
            f"{server.url} takes {room} tokens, rows here have up to {longest}.",
            mend=f"Start it with --max-model-len {longest}, or lower data.max_length.", pointer="/data/max_length",
        )  # fmt: skip
    text = str(tokenizer.decode(list(prompt)))
    body = {"model": server.model, "prompt": text, "add_special_tokens": False}
    try:
        reply = httpx.post(f"{server.url}/tokenize", json=body, timeout=60, trust_env=False)
        reply.raise_for_status()
        tokens = reply.json()["tokens"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise InputError(f"{server.url} does not say how it tokenises: {error!r}.", pointer="/data/server") from error
    if tokens != tokenizer(text, add_special_tokens=False)["input_ids"]:
        raise InputError(
            f"{server.url} serves {found.get('root') or server.model}, whose tokens are not this model's.",
            mend="Name a server of this very model, or leave data.server out.", pointer="/data/server",
        )  # fmt: skip
