"""The processes the product consists of, each started on a free port of 127.0.0.1 with its output in a log file.

One context manager per process: entering starts it and returns at once, so that several start side by side;
`Service.wait` returns when it answers; leaving ends it with everything it started. The demo, `make up` and the tests
use these same ones.

Not for production: one machine, no TLS, no authentication in front of Prefect. compose.yaml states the same processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import httpx

from fastmtp import procs
from fastmtp.protocol import WORK_POOL

# No call leaves the machine, a missing API URL fails instead of starting a private server, and slots survive a restart.
PREFECT_ENV = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_CLI_PROMPT": "false",
}


@dataclass(frozen=True)
class Service:
    """A started process: `url` is where it answers, `env` what its clients need in their environment."""

    name: str
    url: str
    log: Path
    env: Mapping[str, str]
    child: Popen[bytes]
    ready: Callable[[], bool]

    def wait(self, timeout: float = 300.0) -> None:
        """Return when it answers. Raises ProcessError with the end of its log when it died or took too long."""
        procs.wait_until(self.ready, self.child, what=self.name, log=self.log, timeout=timeout)


@contextlib.contextmanager
def s3_endpoint(root: Path, *, key_id: str, secret: str, buckets: Sequence[str] = ()) -> Iterator[Service]:
    """A real S3 endpoint (rclone) that keeps objects as files below `root/s3`. `key_id` has at least 16 characters."""
    files = root / "s3"
    for bucket in buckets:
        (files / bucket).mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{procs.free_port()}"
    rclone = str(Path(sys.executable).with_name("rclone"))
    argv = [rclone, "serve", "s3", "--addr", address, "--config", str(root / "rclone.conf"), str(files)]
    client_env = {
        "AWS_ENDPOINT_URL_S3": f"http://{address}",
        "AWS_ACCESS_KEY_ID": key_id,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    # In the environment, not on the command line, which any user of the machine can read.
    server_env = {"RCLONE_AUTH_KEY": f'"{key_id},{secret}"'}
    with _started("s3", argv, root, f"http://{address}", env=server_env, client_env=client_env) as service:
        yield service


@contextlib.contextmanager
def prefect_server(root: Path, *, env: Mapping[str, str] | None = None) -> Iterator[Service]:
    """A Prefect server with its UI, its database below `root/prefect`. `url` is the UI; the API is in `env`."""
    port = procs.free_port()
    url = f"http://127.0.0.1:{port}"
    home = root / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    client_env = {**PREFECT_ENV, "PREFECT_HOME": str(home), "PREFECT_API_URL": f"{url}/api"}
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    server_env = {**client_env, "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "10", **(env or {})}
    with _started("prefect", argv, root, url, path="/api/health", env=server_env, client_env=client_env) as service:
        yield service


@contextlib.contextmanager
def worker(root: Path, *, env: Mapping[str, str], name: str = "local", limit: int = 1) -> Iterator[Service]:
    """A process worker on the work pool, with everything its jobs may use in `env` (and PREFECT_API_URL)."""
    argv = [
        sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process",
        "--name", name, "--limit", str(limit),
    ]  # fmt: skip
    full_env = {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_LOGGING_EXTRA_LOGGERS": "fastmtp", **env}
    api_url = env["PREFECT_API_URL"]

    def online() -> bool:
        answer = _ask("POST", f"{api_url}/work_pools/{WORK_POOL}/workers/filter", {})
        return answer is not None and any(one["name"] == name and one["status"] == "ONLINE" for one in answer.json())

    with _started(f"worker-{name}", argv, root, api_url, env=full_env, client_env=env, ready=online) as service:
        yield service


@contextlib.contextmanager
def rest_api(root: Path, *, env: Mapping[str, str]) -> Iterator[Service]:
    """The REST service, its SQLite database below `root`. Ready when its database, migrations and Prefect are."""
    port = procs.free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "api", "serve", "--host", "127.0.0.1", "--port", str(port)]
    full_env = {"FASTMTP_API_DATABASE_URL": f"sqlite+aiosqlite:///{root.resolve()}/fastmtp.db", **env}
    with _started("api", argv, root, url, path="/readyz", env=full_env, client_env={}) as service:
        yield service


@contextlib.contextmanager
def _started(
    name: str,
    argv: Sequence[str],
    root: Path,
    url: str,
    *,
    env: Mapping[str, str],
    client_env: Mapping[str, str],
    path: str | None = None,
    ready: Callable[[], bool] | None = None,
) -> Iterator[Service]:
    """Start one process: ready when `ready()` holds, or `path` answers 200, or, with neither, when anything answers."""

    def answers() -> bool:
        answer = _ask("GET", url + (path or "/"))
        return answer is not None and (path is None or answer.status_code == 200)

    log = root / "logs" / f"{name}.log"
    # A proxy for the outside must not stand between these processes.
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1", "localhost")))
    with procs.spawn(argv, log=log, env={"NO_PROXY": local, "no_proxy": local, **env}) as child:
        yield Service(name, url, log, client_env, child, ready or answers)


def _ask(method: str, url: str, body: object = None) -> httpx.Response | None:
    """The answer, or None when nothing listens there yet."""
    try:
        return httpx.request(method, url, json=body, timeout=5, trust_env=False)
    except httpx.TransportError:
        return None
