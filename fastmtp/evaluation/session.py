"""The servers of one evaluation, one after the other, and what each of them was asked.

Every head gets a server of its own, since one holds one head, and a GPU seldom holds two. All sets and temperatures
are asked on one start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fastmtp.config import EvaluateConfig
from fastmtp.errors import ServingError
from fastmtp.evaluation import gate, lossless
from fastmtp.evaluation.measure import Measured, Prompts, ask, measure, warm_up
from fastmtp.evaluation.report import Head, Losslessness, ServerRun
from fastmtp.progress import Reporter
from fastmtp.serving import Launch, Server, connect, serve

PLAIN = "plain"
Key = tuple[Head, str, float, int]  # head, set, temperature, K


class Session:
    """What is measured with, and what was found.

    Args:
        heads: checkpoints; `base` is the verifier as it came.
        urls: servers that run already, instead of starts, by head; `plain` is one without speculation.
        logs: directory of vLLM's logs.
        longest: vLLM's --max-model-len.
        confidence: of intervals.

    Attributes:
        found: figures and answers by head, set, temperature and K.
        seconds: of each part, for the report.
    """

    def __init__(
        self,
        heads: Mapping[Head, Path],
        urls: Mapping[str, str],
        sets: Sequence[Prompts],
        config: EvaluateConfig,
        logs: Path,
        longest: int,
        confidence: float,
        reporter: Reporter,
    ) -> None:
        self.heads, self.sets, self.config = heads, sets, config
        self.found: dict[Key, Measured] = {}
        self.servers: list[ServerRun] = []
        self.warnings: list[str] = []
        self.seconds = {"starts": 0.0, "answers": 0.0, "lossless": 0.0, "reference": 0.0, "speed": 0.0}
        self._urls, self.logs, self._longest = urls, logs, longest
        self._confidence, self._reporter = confidence, reporter

    def temperatures(self) -> list[float]:
        """Those of the job, and 0 where greedy answers are compared."""
        wanted = list(self.config.temperatures)
        return wanted if 0.0 in wanted or not self.config.lossless else [*wanted, 0.0]

    def measure(self, head: Head, num_speculative_tokens: int, temperatures: Sequence[float]) -> None:
        """Ask one head all sets at all temperatures.

        Raises:
            ServingError: vLLM failed, or did not load the head of the verifier as it came.
        """
        with self._server(head, num_speculative_tokens) as server:
            begun = time.monotonic()
            warm_up(server, self.sets[0], self.config)
            for prompts in self.sets:
                for temperature in temperatures:
                    total = len(prompts.ids)
                    self._reporter.phase(
                        f"{head}: vLLM answers {prompts.name}, K={num_speculative_tokens}", total, "prompts"
                    )
                    measured = measure(
                        head, server, len(self.servers) - 1, prompts, temperature, num_speculative_tokens, self.config,
                        self._confidence, self._reporter,
                    )  # fmt: skip
                    self._keep(measured, server)
            self.seconds["answers"] += time.monotonic() - begun

    def compare_with_plain(self) -> list[Losslessness]:
        """Greedy answers of vLLM without speculation against those of every head, on every set."""
        found = []
        with self._server(PLAIN, None) as server:
            begun = time.monotonic()
            largest_tie = lossless.tie_margin(self.config.dtype)
            for prompts in self.sets:
                self._reporter.phase(f"vLLM answers {prompts.name} without speculation", len(prompts.ids), "prompts")
                answers, _ = ask(server, prompts, 0.0, self.config, self._reporter)
                plain = [answer.token_ids for answer in answers]
                for head in self.heads:
                    measured = self.found[head, prompts.name, 0.0, self.config.num_speculative_tokens]
                    drafted = [answer.token_ids for answer in measured.answers]
                    found.append(
                        lossless.compare(head, prompts.name, prompts.ids, plain, drafted, server.margin, largest_tie)
                    )
            self.seconds["lossless"] += time.monotonic() - begun
        return found

    @property
    def starts_servers(self) -> bool:
        """Whether servers are started; with URLs there are those that are named, and no others."""
        return not self._urls

    def can_start(self, head: str) -> bool:
        """Whether there is a server for this head."""
        return self.starts_servers or head in self._urls

    def arm(self, head: str) -> Callable[[], AbstractContextManager[Server]]:
        """What gives a server of a head with the job's own K, when it is called."""
        k = None if head == PLAIN else self.config.num_speculative_tokens
        if head in self._urls:
            return lambda: contextlib.nullcontext(connect(self._urls[head]))
        return lambda: serve(self.launch(head, k), self.logs / f"vllm-{head}-speed.log")

    def launch(self, head: str, num_speculative_tokens: int | None) -> Launch:
        """How a server of a head is started; without speculation it is the verifier as it came."""
        checkpoint = self.heads["base"] if head == PLAIN else self.heads[_head(head)]
        return Launch.of(self.config, checkpoint, self._longest, num_speculative_tokens)

    @contextlib.contextmanager
    def _server(self, head: str, num_speculative_tokens: int | None) -> Iterator[Server]:
        """Start one, or connect to it, and write it down. Raises ServingError where it runs with another K."""
        if head in self._urls:
            server = connect(self._urls[head])
            running = server.effective.num_speculative_tokens or 0
            if running != (num_speculative_tokens or 0):
                raise ServingError(
                    f"{server.url} drafts {running} tokens per step; {num_speculative_tokens or 0} are asked of {head}."
                )
            self._note(head, server, "")
            yield server
            return
        name = f"vllm-{head}" if num_speculative_tokens in (None, self.config.num_speculative_tokens) else (
            f"vllm-{head}-k{num_speculative_tokens}"
        )  # fmt: skip
        log = self.logs / f"{name}.log"
        self._reporter.phase(f"{head}: vLLM starts")
        begun = time.monotonic()
        with serve(self.launch(head, num_speculative_tokens), log) as server:
            self.seconds["starts"] += time.monotonic() - begun
            self._reporter.say(" ".join(server.command))
            self._note(head, server, log.name)
            yield server

    def _note(self, head: str, server: Server, log: str) -> None:
        seen = server.effective
        self.servers.append(
            ServerRun(
                head="none" if head == PLAIN else _head(head), num_speculative_tokens=seen.num_speculative_tokens or 0,
                method=seen.method, vllm=seen.version or server.version(), command=list(server.command),
                url="" if server.command else server.url, start_seconds=server.start_seconds, log=log,
            )
        )  # fmt: skip

    def _keep(self, measured: Measured, server: Server) -> None:
        """Keep figures, show them, and stop where vLLM says itself that it left the head out."""
        figures = measured.figures
        key: Key = (figures.head, figures.set, figures.temperature, figures.num_speculative_tokens)
        self.found[key] = measured
        shown = {f"acceptance_{place}": rate.value for place, rate in enumerate(figures.rates)}
        shown |= {"mean_acceptance_length": figures.mean_acceptance_length.value, "drafts": float(figures.drafts)}
        note = f"{figures.head}: length {figures.mean_acceptance_length.value:.3f}"
        self._reporter.advance(figures.answers, metrics=shown, note=note)
        if measured.warning:
            self.warnings.append(measured.warning)
        if not gate.useless(figures):
            return
        left_out = server.left_out()
        said = f"vLLM accepts {figures.rates[0].value:.3f} of the first drafts of {figures.head} on {figures.set}"
        if figures.head == "base" and left_out:
            # Nothing that follows could be believed.
            raise ServingError(f"{said}: it did not load the verifier's own head. Its log: {left_out[0]}")
        self.warnings.append(f"{said}: its head was not loaded, or is useless.{_quoted(left_out)}")


def _quoted(left_out: Sequence[str]) -> str:
    return f" vLLM's log: {left_out[0]}" if left_out else ""


def _head(name: str) -> Head:
    heads: dict[str, Head] = {"base": "base", "tuned": "tuned", "incumbent": "incumbent"}
    return heads[name]
