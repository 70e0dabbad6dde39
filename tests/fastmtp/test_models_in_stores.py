"""A model that lies in S3 as the input of a job, and what is published of it: brought here, checked, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastmtp import storage
from fastmtp.compare import compare
from fastmtp.config import PublishConfig
from fastmtp.errors import ConfigError, IntegrityError
from fastmtp.extract import HEAD_FILE, extract
from fastmtp.pipeline import resolve_model
from fastmtp.preflight import Policy, check_model
from fastmtp.progress import Reporter
from fastmtp.publish import fetch_incumbent, identity, publish_checkpoint
from fastmtp.stitch import stitch
from fastmtp.upload import Options, publish
from tests.conftest import S3Server
from tests.fastmtp.s3proxy import Proxy, proxy
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.test_storage import entries, make_bucket, use

QUIET = Reporter("publish", quiet=True)


@pytest.fixture
def store(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("FASTMTP_CACHE_DIR", str(tmp_path / "cache"))
    with proxy(s3_server.url) as found:
        use(S3Server(found.url, {**s3_server.env, "AWS_ENDPOINT_URL_S3": found.url}, s3_server.directory), monkeypatch)
        make_bucket()
        yield found


@pytest.fixture
def base(store: Proxy, tmp_path: Path) -> str:
    """A model's prefix, its head in a file of its own."""
    model = write(tmp_path / "model", family="qwen3-next", plan=Plan(shards=3, head="own file"))
    client = storage.s3_client()
    for path in model.iterdir():
        client.upload_file(str(path), "models", f"{tmp_path.name}/base/{path.name}")
    client.close()
    store.requests.clear()
    return f"s3://models/{tmp_path.name}/base"


def stitched(model: Path, place: Path) -> Path:
    """The model with a head of which every value differs a little."""
    extract(model, place / "head", QUIET)
    content = bytearray((place / "head" / HEAD_FILE).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin::2] = bytes(byte ^ 1 for byte in content[begin::2])
    (place / "tuned.safetensors").write_bytes(content)
    stitch(model, place / "tuned.safetensors", place / "checkpoint", QUIET)
    return place / "checkpoint"


def reads(store: Proxy) -> list[str]:
    """Shards that were read from."""
    return [request.key for request in store.requests if request.method == "GET" and request.key.endswith("tensors")]


def test_a_job_from_s3_to_s3(base: str, store: Proxy, tmp_path: Path) -> None:
    summary = check_model(base, Policy())
    assert summary["family"] == "qwen3-next"
    model = resolve_model(base)
    assert compare(tmp_path / "model", model, QUIET).verdict == "identical"
    store.requests.clear()
    assert resolve_model(base) == model and not reads(store)
    checkpoint = stitched(model, tmp_path)
    uri = f"s3://models/{tmp_path.name}/out"
    about = {"verifier": identity(model)}
    store.sent.clear()
    receipt = publish_checkpoint(
        checkpoint, config(uri, unchanged="refer"), tmp_path / "receipt", about, QUIET, model=model
    )
    touched = (checkpoint / "mtp.safetensors").stat().st_size
    side = sum(path.stat().st_size for path in checkpoint.iterdir() if path.suffix != ".safetensors")
    assert touched <= sum(count for key, count in store.sent.items() if "/v-" in key) <= touched + side + 8192
    # A version is a model like any other, by its own URI, its destination or an alias.
    for name in (receipt.summary["uri"], uri):
        assert check_model(name, Policy())["family"] == "qwen3-next"
    published = resolve_model(uri)
    assert compare(checkpoint, published, QUIET).verdict == "identical"
    found = compare(model, published, QUIET)
    assert found.verdict == "exactly the head" and not found.side_files
    with pytest.raises(ConfigError, match="outside what this service may use"):
        check_model(uri, Policy(sources=(uri,)))
    Policy(sources=(uri,)).require_source(f"{uri}@production", "/model")
    # Of an incumbent, only what differs from the model is read.
    store.requests.clear()
    assert fetch_incumbent(uri, model, tmp_path / "incumbent", QUIET)
    assert {key.rpartition("/")[2] for key in reads(store)} == {"mtp.safetensors"}
    assert compare(checkpoint, tmp_path / "incumbent", QUIET).verdict == "identical"


def test_a_manifest_cannot_make_a_job_read_what_it_may_not(base: str, store: Proxy, tmp_path: Path) -> None:
    """Whoever may write to the destination could say that a shard lies where only the service may read."""
    checkpoint, uri = stitched(tmp_path / "model", tmp_path), f"{base}-out"
    seen: list[str] = []

    def allow(place: str) -> None:
        seen.append(place)
        raise ConfigError(place)

    options = {"unchanged": "refer", "base": base}
    publish_checkpoint(checkpoint, config(uri, **options), tmp_path / "one", {}, QUIET)
    manifest = storage.latest(uri)
    assert manifest and any(item["uri"].startswith(f"{base}/") for item in manifest["files"])
    later = publish(checkpoint, uri, "v-2", entries(checkpoint), {}, options=Options(unchanged="refer", allow=allow))
    assert seen and all(place.startswith(f"{base}/") for place in seen)
    assert all(item["uri"].startswith(f"{uri}/v-") for item in later["files"])


def config(uri: str, **fields: Any) -> PublishConfig:
    return PublishConfig.model_validate({"uri": uri, **fields})


def test_a_checkpoint_that_changed_since_it_was_stitched(base: str, store: Proxy, tmp_path: Path) -> None:
    checkpoint = stitched(tmp_path / "model", tmp_path)
    with (checkpoint / "mtp.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x11")
    with pytest.raises(IntegrityError, match=r"mtp\.safetensors"):
        publish_checkpoint(checkpoint, config(f"{base}-out"), tmp_path / "receipt", {}, QUIET)
    assert storage.latest(f"{base}-out") is None


def fastmtp(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fastmtp", *arguments, "--json"], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_verbs(base: str, store: Proxy, tmp_path: Path) -> None:
    checkpoint, uri = str(stitched(tmp_path / "model", tmp_path)), f"{base}-out"
    plan = fastmtp("publish", checkpoint, "--to", uri, "--dry-run")
    assert plan["files"] == 11 and not any(
        request.method == "PUT" for request in store.requests if "out" in request.key
    )
    version = fastmtp("publish", checkpoint, "--to", uri, "--base", base, "--alias", "canary")["summary"]["version"]
    assert fastmtp("versions", uri, "--alias", f"production={version}", "--keep", "1")["versions"][0]["names"] == [
        "latest", "canary", "production",
    ]  # fmt: skip
    assert fastmtp("verify", f"{uri}/{version}")["files"] == 11
    assert fastmtp("fetch", f"{uri}@production", str(tmp_path / "served"))["fetched"] == 11
    assert compare(checkpoint, tmp_path / "served", QUIET).verdict == "identical"
