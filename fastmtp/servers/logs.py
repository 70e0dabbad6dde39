"""What vLLM's log says: what it runs with, what it left out of a checkpoint, and why it ended.

The lines are those of vLLM 0.32; where another version words them otherwise, nothing is concluded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from fastmtp import procs

_ENGINE = re.compile(r"Initializing a V1 LLM engine \(v(?P<version>[^)]+)\) with config: (?P<config>.+)")
_SPECULATION = re.compile(
    r"speculative_config=SpeculativeConfig\(method='(?P<method>\w+)'.*?num_spec_tokens=(?P<k>\d+)\)"
)
_CACHING = re.compile(r"enable_prefix_caching=(True|False)")
_EXCEPTION = re.compile(r"\b(\w+(?:Error|Exception|Timeout)\b: (?:.*validation errors? for .*(?:\n.*){1,2}|.+))")
# A tensor that the loader did not know, or one of the model that it found nothing for.
_LEFT_OUT = re.compile(
    r"(?:WARNING|ERROR).*?\]\s*(.*(?:weight|param|tensor).*(?:skip|not found|not initialized|not loaded|missing).*"
    r"|.*(?:skip|not found|not initialized|missing).*(?:weight|param|tensor|mtp\.).*)",
    re.IGNORECASE,
)
_KNOWN = (
    (
        r"No available memory for the cache blocks|out of memory|OutOfMemory|less than desired GPU memory"
        r"|larger than the available KV cache memory|less than requested memory for kv|Failed to allocate"
        r"|Cannot allocate memory",
        "The model does not fit: give it more devices (evaluate.server_args: [--tensor-parallel-size, N]), lower"
        " evaluate.max_tokens or concurrency, or on a CPU raise VLLM_CPU_KVCACHE_SPACE (GB).",
    ),
    (r"Address already in use", "Its port is taken."),
    (r"No module named 'vllm'", "FASTMTP_VLLM_PYTHON has no vllm in it: `make setup`."),
    (
        r"unrecognized arguments|invalid choice|expected one argument",
        "This vLLM does not know an argument: look at evaluate.server_args, and at vLLM's version.",
    ),
    (
        r"Model architectures .* are not supported|does not recognize this architecture",
        "This vLLM does not serve the architecture: install a version that does.",
    ),
    (
        r"weights were not initialized from checkpoint|There is no module or parameter named",
        "vLLM does not find the checkpoint's tensors under the names it looks for: `fastmtp inspect` says why, and"
        " `fastmtp stitch --mend` writes what it loads.",
    ),
)  # fmt: skip


class Effective(NamedTuple):
    """What a server says it runs with; None where it does not say."""

    version: str | None = None
    method: str | None = None
    num_speculative_tokens: int | None = None
    prefix_caching: bool | None = None


def effective(text: str) -> Effective:
    """What an engine was started with, from its own line about it."""
    line = _ENGINE.search(text)
    return of_config(line["version"], line["config"]) if line else Effective()


def of_config(version: str, config: str) -> Effective:
    """The same from vLLM's configuration as it prints it."""
    speculation, caching = _SPECULATION.search(config), _CACHING.search(config)
    return Effective(
        version,
        speculation["method"] if speculation else "none",
        int(speculation["k"]) if speculation else 0,
        caching[1] == "True" if caching else None,
    )


def left_out(text: str) -> list[str]:
    """Warnings about tensors that were skipped, or not found, each once."""
    return list(dict.fromkeys(found.strip()[:300] for found in _LEFT_OUT.findall(text)))


def cause(text: str) -> str:
    """The last exception that a log names: what follows it is only how the server came down."""
    # What pydantic found wrong stands on the lines after the exception.
    found: list[str] = [" ".join(line.split()) for line in _EXCEPTION.findall(text)]
    deeper = [line for line in found if not line.startswith(("EngineDeadError", "RuntimeError: Engine core init"))]
    return (deeper or found or [""])[-1].partition(", please check the stack trace")[0][:400]


def hopeless(text: str) -> bool:
    """Whether the engine has given up. What follows in the log is only how the rest comes down."""
    return "EngineCore failed to start" in text or "Engine core initialization failed" in text


def mend(text: str) -> str:
    """What helps against the usual causes, where one is recognised."""
    return next((mend for pattern, mend in _KNOWN if re.search(pattern, text)), "")


def explained(log: Path) -> str:
    """Cause, mend, and where the log is, for an error about a server that failed."""
    text = procs.tail(log, lines=600)
    found = cause(text)
    lines = "" if found else f" Last lines:\n{procs.tail(log)}"
    return " ".join(part for part in (f"{found}." if found else "", mend(text), f"See {log}.{lines}") if part)
