"""Fixtures of places where a checkpoint lies: a directory, a second S3 endpoint, and a hub of our own."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastmtp import procs
from fastmtp.files import LocalFiles, S3Files
from fastmtp.hub import HubFiles
from fastmtp.progress import Reporter
from tests.conftest import S3Server
from tests.fastmtp.hub import Hub, serve
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import small_config


@pytest.fixture(scope="session")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real verifier, half trained: enough that its head drafts something, quick enough for a test."""
    from fastmtp.tiny import Recipe, build

    target = tmp_path_factory.mktemp("tiny") / "verifier"
    build(target, Recipe(verifier_steps=110, head_steps=50, problems=1500), Reporter("preflight", quiet=True))
    return target


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose files are much larger than what a first read takes."""
    config = small_config("qwen3.5-moe", vocab_size=8192, hidden_size=128, moe_intermediate_size=256, num_experts=4)
    plan = Plan(shards=3, head="spread")
    return write(tmp_path_factory.mktemp("files") / "m", family="qwen3.5-moe", config=config, plan=plan)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The other real endpoint: moto's."""
    import httpx

    root = tmp_path_factory.mktemp("moto")
    url = f"http://127.0.0.1:{procs.free_port()}"
    argv = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/moto-api/", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    with procs.spawn(argv, log=root / "log") as child:
        procs.wait_until(ready, child, what="moto", log=root / "log", timeout=60)
        env = {"AWS_ENDPOINT_URL_S3": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        yield S3Server(url, env | {"AWS_DEFAULT_REGION": "us-east-1"}, root)


@pytest.fixture
def hub(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Our hub in the place of the real one, with an empty cache."""
    with serve(wide) as hub, use_hub(hub.url, tmp_path / "cache", monkeypatch):
        yield hub


@contextlib.contextmanager
def use_hub(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub in the place of the real one."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    _close()
    yield
    _close()


def _close() -> None:
    from huggingface_hub.utils import close_session

    close_session()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes asked of each file, whatever kind of place it is in."""
    found: Counter[str] = Counter()

    def counting(kind: type) -> None:
        read = kind.read

        def counted(self: object, name: str, begin: int, end: int) -> bytes:
            found[name] += end - begin
            data: bytes = read(self, name, begin, end)
            return data

        monkeypatch.setattr(kind, "read", counted)

    for kind in (LocalFiles, S3Files, HubFiles):
        counting(kind)
    return found


@pytest.fixture
def no_hub(free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with use_hub(f"http://127.0.0.1:{free_port}", tmp_path / "cache", monkeypatch):
        yield
