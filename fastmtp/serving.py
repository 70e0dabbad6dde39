"""vLLM's own server: started, waited for, checked, and ended with everything it started; or one that runs already.

What was asked for is read back from the server before any figure is taken: another method, another number of draft
tokens or a cache that was to be off would make it a figure of something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from fastmtp import procs
from fastmtp.errors import InputError, ProcessError, ServingError
from fastmtp.servers import logs
from fastmtp.servers.client import Answer, Counters, Request, Server
from fastmtp.servers.launching import SERVED_NAME, Launch, has_gpu, server_environment, vllm_python

__all__ = ["Answer", "Counters", "Launch", "Request", "Server", "connect", "has_gpu", "serve", "vllm_python"]

START_SECONDS = 1800.0  # large checkpoints load slowly; a server that dies is noticed at once
_PORTS_TRIED = 2


@contextlib.contextmanager
def serve(launch: Launch, log: Path, *, port: int | None = None) -> Iterator[Server]:
    """Start vLLM, yield it when it answers, end it on leaving.

    Args:
        log: its output; written anew.
        port: to listen on; a free one when unset, and another one should somebody take that meanwhile.

    Raises:
        InputError: no vLLM environment.
        ServingError: it died, did not come up, or runs with something else than it was started with.
    """
    for left in reversed(range(_PORTS_TRIED if port is None else 1)):
        chosen = port or procs.free_port()
        url = f"http://127.0.0.1:{chosen}"
        command = launch.command(vllm_python(), chosen, gpu=has_gpu())
        log.unlink(missing_ok=True)
        begun = time.monotonic()
        with procs.spawn(command, log=log, run_id=os.environ.get(procs.MARKER), env=server_environment()) as child:
            try:
                ready = functools.partial(_serves, url, launch.checkpoint, log)
                procs.wait_until(ready, child, what="vLLM", log=log, timeout=START_SECONDS)
            except ProcessError as error:
                if left and "Address already in use" in procs.tail(log, lines=600):
                    continue
                status = "" if error.returncode is None else f" (status {error.returncode})"
                raise ServingError(f"vLLM did not start{status}: {logs.explained(log)}") from error
            found = logs.effective(log.read_text("utf-8", "replace"))
            seconds, seeds = time.monotonic() - begun, has_gpu() or not launch.num_speculative_tokens
            server = Server(url, SERVED_NAME, log, tuple(command), found, seconds, seeds)
            _require_as_asked(launch, server)
            yield server
            return


def connect(url: str) -> Server:
    """A server that runs already. Raises InputError when nothing that serves a model answers there."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        reply = httpx.get(f"{base}/v1/models", timeout=30, trust_env=False)
        reply.raise_for_status()
        name = str(reply.json()["data"][0]["id"])
        # Only a server in development mode shows its configuration.
        shown = httpx.get(f"{base}/server_info", timeout=30, trust_env=False)
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"{url} is no vLLM server that answers ({error!r}).",
            mend="Give the URL of a running one: http://HOST:PORT.",
        ) from error
    server = Server(base, name)
    version = server.version()
    if shown.status_code == 200:
        return dataclasses.replace(server, effective=logs.of_config(version, str(shown.json().get("vllm_config"))))
    # Each draft position has a counter from the start.
    tokens = len(server.counters().accepted) if server.speculates() else 0
    method = None if tokens else "none"
    return dataclasses.replace(server, effective=logs.Effective(version, method, tokens))


def _serves(url: str, checkpoint: Path, log: Path) -> bool:
    """Whether this very checkpoint is served there: on a taken port somebody else's server would answer.

    Raises ProcessError where the log says that nothing will come of it: vLLM takes its time to come down.
    """
    if logs.hopeless(procs.tail(log, lines=400)):
        raise ProcessError("vLLM's engine failed.")
    try:
        reply = httpx.get(f"{url}/v1/models", timeout=5, trust_env=False)
        return reply.status_code == 200 and any(
            model.get("root") == str(checkpoint.resolve()) for model in reply.json()["data"]
        )
    except (httpx.HTTPError, json.JSONDecodeError, KeyError, AttributeError, TypeError):
        return False


def _require_as_asked(launch: Launch, server: Server) -> None:
    """Raise ServingError where the server runs with something else, as far as it says with what."""
    found = server.effective
    asked = {
        "method": launch.method,
        "num_speculative_tokens": launch.num_speculative_tokens or 0,
        "prefix_caching": launch.prefix_caching,
    }
    for name, wanted in asked.items():
        value = getattr(found, name)
        if value is not None and value != wanted:
            raise ServingError(f"vLLM was started with {name} {wanted}, and runs with {value}; see {server.log}.")
