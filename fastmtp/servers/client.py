"""Asking a vLLM server: answers to token ids, its counters, and how sure it was of a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    """

    url: str
    model: str
    log: Path | None = None
    command: tuple[str, ...] = ()
    effective: Effective = field(default_factory=Effective)
    start_seconds: float = 0.0

    def counters(self) -> Counters:
        """Read /metrics. Raises ServingError when the server does not count drafts: it does not speculate."""
        drafts, accepted, seen = 0, dict[int, int](), False
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                # The `_created` lines beside each counter are time stamps.
                if sample.name == f"{_DRAFTS}_total":
                    drafts, seen = drafts + int(sample.value), True
                elif sample.name == f"{_ACCEPTED}_total":
                    position = int(sample.labels["position"])
                    accepted[position] = accepted.get(position, 0) + int(sample.value)
        if not seen:
            raise ServingError(f"vLLM at {self.url} counts no drafts, so it does not speculate.{self._see()}")
        return Counters(drafts, tuple(accepted.get(position, 0) for position in range(max(accepted, default=-1) + 1)))

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
        answers: list[Answer | None] = [None] * len(requests)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        with (
            httpx.Client(base_url=self.url, timeout=_ANSWER_SECONDS, limits=limits, trust_env=False) as client,
            ThreadPoolExecutor(concurrency) as pool,
        ):
            jobs = {pool.submit(self._one, client, request, sampling): n for n, request in enumerate(requests)}
            try:
                for job in as_completed(jobs):
                    answer = answers[jobs[job]] = job.result()
                    on_answer(jobs[job], answer)
            except BaseException:
                # Requests on their way end with the client, or a server that died would keep us waiting.
                pool.shutdown(wait=False, cancel_futures=True)
                client.close()
                raise
        return [answer for answer in answers if answer is not None]

    def margin(self, prompt: Sequence[int], first: int, second: int) -> float | None:
        """How much larger the logit of token `first` is than that of `second` after `prompt`.

        Where one is not among the likeliest 20, the figure is the least that it can be; None where neither is.
        """
        body = {
            "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0, "logprobs": _TOP,
            "return_tokens_as_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        with httpx.Client(base_url=self.url, timeout=_ANSWER_SECONDS, trust_env=False) as client:
            choice = self._post(client, body)["choices"][0]
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

    def _one(self, client: httpx.Client, request: Request, sampling: SamplingConfig) -> Answer:
        body = {
            "prompt": list(request.prompt), "max_tokens": request.max_tokens, "seed": request.seed,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "return_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        reply = self._post(client, body)
        choice = reply["choices"][0]
        if choice.get("token_ids") is None:
            raise ServingError(f"vLLM at {self.url} gives no token ids; it must be 0.11 or newer.")
        found = ((reply.get("metrics") or {}).get("speculative_decoding") or {}).get("acceptance_histogram")
        return Answer(tuple(choice["token_ids"]), choice["finish_reason"], tuple(found) if found else None)

    def _post(self, client: httpx.Client, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        try:
            reply = client.post("/v1/completions", json={"model": self.model, **body})
            reply.raise_for_status()
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise ServingError(f"vLLM failed while it answered.{self._see()}") from error
            raise ServingError(f"vLLM refused a prompt: {error.response.text[:300]}") from error
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: our own client was closed meanwhile
            raise ServingError(f"vLLM stopped answering ({error!r}).{self._see()}") from error
        return reply.json()

    def _see(self) -> str:
        return f" {logs.explained(self.log)}" if self.log else ""
