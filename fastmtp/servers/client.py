"""Asking a vLLM server: answers to token ids, its counters, and how sure it was of a token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from fastmtp.config import SamplingConfig
from fastmtp.errors import ServingError
from fastmtp.servers import logs
from fastmtp.servers.logs import Effective

_ANSWER_SECONDS = 3600.0  # one answer, queueing included
_SETTLE_SECONDS = 3.0
_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
_TOP = 20  # most log-probabilities that vLLM gives unless it is told otherwise


@dataclass(frozen=True)
class Request:
    """One prompt to answer: its token ids, most tokens of the answer, and the seed of its sampling."""

    prompt: Sequence[int]
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        token_ids: as generated, the one that ends it included.
        finish: `stop` or `length`.
        histogram: how many drafts had 0, 1, ... K tokens accepted, where the server reports it.
    """

    token_ids: tuple[int, ...]
    finish: str
    histogram: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Counters:
    """vLLM's speculative decoding counters, summed over engines."""

    drafts: int
    accepted: tuple[int, ...]

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`."""
        width = max(len(self.accepted), len(before.accepted))
        now, then = (list(one.accepted) + [0] * (width - len(one.accepted)) for one in (self, before))
        return Counters(self.drafts - before.drafts, tuple(a - b for a, b in zip(now, then, strict=True)))


@dataclass(frozen=True)
class Server:
    """A running vLLM server.

    Attributes:
        model: the name under which it serves the model.
        log: its log, where it is ours.
        command: its command line, where it is ours.
        effective: what it says it runs with.
        start_seconds: from its start until it answered; 0 where it ran already.
        seeds: requests may carry seeds of their own. On a CPU, vLLM 0.32 dies of them when it speculates.
    """

    url: str
    model: str
    log: Path | None = None
    command: tuple[str, ...] = ()
    effective: Effective = field(default_factory=Effective)
    start_seconds: float = 0.0
    seeds: bool = True

    def counters(self) -> Counters:
        """Read /metrics. Raises ServingError when the server does not count drafts: it does not speculate."""
        found = self._counted()
        if found is None:
            raise ServingError(f"vLLM at {self.url} counts no drafts, so it does not speculate.{self._see()}")
        return found

    def speculates(self) -> bool:
        """Whether it counts drafts."""
        return self._counted() is not None

    def _counted(self) -> Counters | None:
        drafts, accepted = None, dict[int, int]()
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                # The `_created` lines beside each counter are time stamps.
                if sample.name == f"{_DRAFTS}_total":
                    drafts = (drafts or 0) + int(sample.value)
                elif sample.name == f"{_ACCEPTED}_total":
                    position = int(sample.labels["position"])
                    accepted[position] = accepted.get(position, 0) + int(sample.value)
        if drafts is None:
            return None
        return Counters(drafts, tuple(accepted.get(position, 0) for position in range(max(accepted, default=-1) + 1)))

    def settled(self, drafts: int) -> Counters:
        """`counters`, once they show at least `drafts`: vLLM counts a step after it has sent the step's tokens."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (found := self.counters()).drafts < drafts and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def version(self) -> str:
        """vLLM's version."""
        return str(json.loads(self.get("/version"))["version"])

    def left_out(self) -> list[str]:
        """Tensors that the server says it skipped or did not find, as far as its log is ours."""
        return logs.left_out(self.log.read_text("utf-8", "replace")) if self.log else []

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        concurrency: int,
        on_answer: Callable[[int, Answer], None] = lambda _place, _answer: None,
    ) -> list[Answer]:
        """Answer every request, `concurrency` at once.

        Args:
            on_answer: hears place and answer of each as it is finished, in any order, from the calling thread.

        Returns:
            The answers in the order of the requests.

        Raises:
            ServingError: the server refused a request or died.
        """
        return asyncio.run(self._all(requests, sampling, concurrency, on_answer))

    async def _all(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        concurrency: int,
        on_answer: Callable[[int, Answer], None],
    ) -> list[Answer]:
        """Answer all; the first failure, or a signal, ends every request that is on its way at once."""
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(requests))
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=_ANSWER_SECONDS, limits=limits, trust_env=False
        ) as client:

            async def work(waiting: Iterator[tuple[int, Request]]) -> None:
                for place, request in waiting:
                    answers[place] = await self._one(client, request, sampling)
                    on_answer(place, answers[place])

            workers = [asyncio.create_task(work(waiting)) for _ in range(min(concurrency, len(requests)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
        return [answers[place] for place in range(len(requests))]

    def margin(self, prompt: Sequence[int], first: int, second: int) -> float | None:
        """How much larger the logit of token `first` is than that of `second` after `prompt`.

        Where one is not among the likeliest 20, the figure is the least that it can be; None where neither is.
        """
        body = {
            "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0, "logprobs": _TOP,
            "return_tokens_as_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        choice = asyncio.run(self._alone(body))["choices"][0]
        found = {int(name.rpartition(":")[2]): value for name, value in choice["logprobs"]["top_logprobs"][0].items()}
        if first not in found and second not in found:
            return None
        least = min(found.values())
        return float(found.get(first, least) - found.get(second, least))

    def get(self, path: str) -> str:
        """The text at a path. Raises ServingError when the server does not answer."""
        try:
            reply = httpx.get(self.url + path, timeout=30, trust_env=False)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise ServingError(f"vLLM at {self.url} does not answer {path}: {error!r}.{self._see()}") from error
        return reply.text

    async def _alone(self, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        async with httpx.AsyncClient(base_url=self.url, timeout=_ANSWER_SECONDS, trust_env=False) as client:
            return await self._post(client, body)

    async def _one(self, client: httpx.AsyncClient, request: Request, sampling: SamplingConfig) -> Answer:
        body = {
            "prompt": list(request.prompt), "max_tokens": request.max_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "return_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        if self.seeds and sampling.temperature > 0:
            body["seed"] = request.seed
        reply = await self._post(client, body)
        choice = reply["choices"][0]
        if choice.get("token_ids") is None:
            raise ServingError(f"vLLM at {self.url} gives no token ids; it must be 0.11 or newer.")
        found = ((reply.get("metrics") or {}).get("speculative_decoding") or {}).get("acceptance_histogram")
        return Answer(tuple(choice["token_ids"]), choice["finish_reason"], tuple(found) if found else None)

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        try:
            reply = await client.post("/v1/completions", json={"model": self.model, **body})
            reply.raise_for_status()
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise ServingError(f"vLLM failed while it answered.{self._see()}") from error
            raise ServingError(f"vLLM refused a prompt: {error.response.text[:300]}") from error
        except httpx.HTTPError as error:
            raise ServingError(f"vLLM stopped answering ({error!r}).{self._see()}") from error
        return reply.json()

    def _see(self) -> str:
        return f" {logs.explained(self.log)}" if self.log else ""
