"""vLLM's own server, as a child process: started, waited for, asked, counted, and ended with everything it started.

vLLM lives in an environment of its own, since its pins and ours cannot meet; nothing here imports it. The interpreter
is FASTMTP_VLLM_PYTHON, else `.venv-vllm/bin/python` in the working directory or beside this package's source.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from fastmtp import procs
from fastmtp.config import EvaluateConfig
from fastmtp.errors import InputError, ProcessError, ServingError

# The file name of a checkpoint tells vLLM nothing, and a user's text in it might: some methods are guessed from names.
SERVED_NAME = "checkpoint"
START_SECONDS = 1800.0  # large checkpoints load slowly; a server that dies is noticed at once
_ANSWER_SECONDS = 3600.0  # one answer, queueing included
_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Answer:
    """One answer: token ids as generated, and why it ended (`stop` or `length`)."""

    token_ids: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Counters:
    """vLLM's speculative decoding counters, summed over engines."""

    drafts: int
    accepted: tuple[int, ...]

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`."""
        accepted = tuple(now - then for now, then in zip(self.accepted, before.accepted, strict=True))
        return Counters(self.drafts - before.drafts, accepted)


class Server:
    """A running vLLM server."""

    def __init__(self, url: str, log: Path, num_speculative_tokens: int) -> None:
        self.url = url
        self._log = log
        self._num_tokens = num_speculative_tokens

    def counters(self) -> Counters:
        """Read /metrics. Raises ServingError when the server does not count drafts: it does not speculate."""
        drafts, accepted, seen = 0, [0] * self._num_tokens, False
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                # The `_created` lines beside each counter are time stamps.
                if sample.name == f"{_DRAFTS}_total":
                    drafts, seen = drafts + int(sample.value), True
                elif sample.name == f"{_ACCEPTED}_total":
                    accepted[int(sample.labels["position"])] += int(sample.value)
        if not seen:
            raise ServingError(f"vLLM counts no drafts, so it does not speculate; see {self._log}.")
        return Counters(drafts, tuple(accepted))

    def version(self) -> str:
        """vLLM's version."""
        return str(json.loads(self._get("/version"))["version"])

    def generate(
        self, prompts: Sequence[Sequence[int]], config: EvaluateConfig, on_done: Callable[[int], None]
    ) -> list[Answer]:
        """Answer every prompt (token ids), `config.concurrency` at once; `on_done` hears how many are done.

        Raises:
            ServingError: the server refused a request or died.
        """
        answers: list[Answer | None] = [None] * len(prompts)
        limits = httpx.Limits(max_connections=config.concurrency)
        with (
            httpx.Client(base_url=self.url, timeout=_ANSWER_SECONDS, limits=limits, trust_env=False) as client,
            ThreadPoolExecutor(config.concurrency) as pool,
        ):
            jobs = {pool.submit(self._one, client, ids, config): place for place, ids in enumerate(prompts)}
            try:
                for done, job in enumerate(as_completed(jobs), start=1):
                    answers[jobs[job]] = job.result()
                    on_done(done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [answer for answer in answers if answer is not None]

    def _one(self, client: httpx.Client, ids: Sequence[int], config: EvaluateConfig) -> Answer:
        body = {
            "model": SERVED_NAME, "prompt": list(ids), "max_tokens": config.max_tokens, "seed": 0,
            "temperature": config.temperature, "return_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        try:
            reply = client.post("/v1/completions", json=body)
            reply.raise_for_status()
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                raise ServingError(f"vLLM failed while it answered: {_cause(self._log)}. See {self._log}.") from error
            raise ServingError(f"vLLM refused a prompt: {error.response.text[:300]}") from error
        except httpx.HTTPError as error:
            raise ServingError(f"vLLM stopped answering ({error!r}). Last lines:\n{procs.tail(self._log)}") from error
        choice = reply.json()["choices"][0]
        return Answer(tuple(choice["token_ids"]), choice["finish_reason"])

    def _get(self, path: str) -> str:
        reply = httpx.get(self.url + path, timeout=30, trust_env=False)
        reply.raise_for_status()
        return reply.text


@contextlib.contextmanager
def serve(checkpoint: Path, config: EvaluateConfig, *, max_model_len: int, log: Path) -> Iterator[Server]:
    """Start vLLM on a checkpoint with its MTP head drafting, yield it when it answers, end it on leaving.

    Raises:
        InputError: no vLLM environment.
        ServingError: it died or did not come up; the log's last lines are in the message.
    """
    port = procs.free_port()
    url = f"http://127.0.0.1:{port}"
    command = _command(checkpoint, config, port, max_model_len)
    log.unlink(missing_ok=True)
    with procs.spawn(command, log=log, run_id=os.environ.get(procs.MARKER), env=_environment()) as child:
        try:
            procs.wait_until(lambda: _healthy(url), child, what="vLLM", log=log, timeout=START_SECONDS)
        except ProcessError as error:
            raise ServingError(_explain(log) + str(error)) from error
        yield Server(url, log, config.num_speculative_tokens)


def vllm_python() -> Path:
    """The interpreter of vLLM's environment. Raises InputError when there is none."""
    named = os.environ.get("FASTMTP_VLLM_PYTHON")
    candidates = [Path(named)] if named else []
    if not named:
        candidates = [Path.cwd(), Path(__file__).resolve().parents[1]]
        candidates = [root / ".venv-vllm" / "bin" / "python" for root in candidates]
    for candidate in candidates:
        if shutil.which(candidate):
            return candidate
    raise InputError(
        f"No vLLM environment: {candidates[0]} is not there.",
        mend="`make setup` makes one; or set FASTMTP_VLLM_PYTHON to the python of yours.",
    )


def _command(checkpoint: Path, config: EvaluateConfig, port: int, max_model_len: int) -> list[str]:
    speculation = {"method": "mtp", "num_speculative_tokens": config.num_speculative_tokens}
    # The module is the same server as `vllm serve`, and unlike it also runs from the CPU wheel.
    # Prefix caching stays off: with MTP on hybrid models it crashes or reuses the wrong state.
    return [
        str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(checkpoint.resolve()), "--served-model-name", SERVED_NAME,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype,
        "--max-model-len", str(max_model_len), "--max-num-seqs", str(config.concurrency),
        "--no-enable-prefix-caching", "--enforce-eager", "--seed", "0",
        "--speculative-config", json.dumps(speculation), *config.server_args,
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        # Ours would put our packages into its interpreter.
        "PYTHONPATH": "",
    }


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _cause(log: Path) -> str:
    """The last exception that the log names: what follows it is only how the server came down."""
    found: list[str] = re.findall(r"\b(\w+(?:Error|Exception|Timeout)\b: .+)", procs.tail(log, lines=400))
    deeper = [line for line in found if not line.startswith("EngineDeadError")]
    return (deeper or found or ["no exception in its log"])[-1][:300]


def _explain(log: Path) -> str:
    """The usual causes, recognised in the log, each with its mend."""
    text = procs.tail(log, lines=400)
    known = (
        (r"No available memory for the cache blocks|out of memory|OutOfMemory", "The model does not fit: "
         "give it more devices in evaluate.server_args, or raise VLLM_CPU_KVCACHE_SPACE. "),
        (r"Address already in use", "Its port was taken meanwhile: run again. "),
        (r"No module named 'vllm'", "FASTMTP_VLLM_PYTHON has no vllm in it: `make setup`. "),
    )  # fmt: skip
    return next((mend for pattern, mend in known if re.search(pattern, text)), "")
