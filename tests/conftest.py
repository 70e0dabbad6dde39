"""Fixtures every package's tests share: real servers, started once a session, in a directory of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy import services
from fastmtp import procs


def pytest_configure(config: pytest.Config) -> None:
    """Set what is read at import: OpenMP's waiting, and Prefect's home, which must not be the user's own."""
    # As the command line does: tests that train run beside servers on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.update(services.PREFECT_ENV)
    os.environ.pop("PREFECT_API_URL", None)
    import tempfile

    if "PREFECT_HOME" not in os.environ:
        os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="fastmtp-prefect-")
    if "FASTMTP_CACHE_DIR" not in os.environ:
        os.environ["FASTMTP_CACHE_DIR"] = tempfile.mkdtemp(prefix="fastmtp-cache-")


@dataclass(frozen=True)
class PrefectServer:
    """A real Prefect server. `env` is what a child process needs to talk to it."""

    api_url: str
    ui_url: str
    env: dict[str, str]
    log: Path


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One server for the session; Prefect clients of this process talk to it while it runs."""
    from prefect.logging.handlers import APILogHandler
    from prefect.settings import PREFECT_API_URL, temporary_settings

    root = tmp_path_factory.mktemp("prefect-server")
    with services.prefect_server(root) as server:
        server.wait()
        api_url = server.env["PREFECT_API_URL"]
        with temporary_settings({PREFECT_API_URL: api_url}):
            yield PrefectServer(api_url, server.url, dict(server.env), server.log)
            # Logs that wait to be sent are sent while there is a server to take them.
            APILogHandler().flush()


@dataclass(frozen=True)
class S3Server:
    """A real S3 endpoint with an empty bucket `models`; `env` names it and its key to boto3."""

    url: str
    env: dict[str, str]
    directory: Path


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One endpoint for the session, objects being files below `directory`."""
    root = tmp_path_factory.mktemp("s3-server")
    with services.s3_endpoint(root, key_id="TESTKEY123456789", secret="test-secret", buckets=["models"]) as server:
        server.wait()
        yield S3Server(server.url, dict(server.env), root / "s3")


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago."""
    return procs.free_port()
