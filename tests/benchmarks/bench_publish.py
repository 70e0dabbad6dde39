"""Publishing a stitched 4 GB checkpoint whose base is in the same store against boto3's upload_file; a first upload.

The stores are rclone's S3 server and, with a smaller model, moto's, on this machine. The model was published there
before; the checkpoint is stitched from it with another head, which lies in a file of its own, by links, so that one
shard of nine is touched. Ours runs twice: shards copied by the store (the default), which these servers do by reading
and writing them on our own disk and cores, and referred to where they lie. The peer sends the directory file by file,
as `upload_file` does by itself: in parts, ten at once.

Seconds are of the calls in one process, each once, on a warm page cache. Ours include finding out what the store has,
claims, manifest and pointer, and proving what arrived; the first upload also hashes every byte, from cold. The peer
proves nothing. Bytes sent are what went into the connections, headers and all.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import httpx
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from deploy import services
from fastmtp import procs, storage
from fastmtp.config import PublishConfig
from fastmtp.extract import HEAD_FILE, extract
from fastmtp.hashing import sha256_all
from fastmtp.progress import Reporter
from fastmtp.publish import publish_checkpoint
from fastmtp.stage import FileEntry, sha256_file
from fastmtp.stitch import stitch
from fastmtp.upload import publish
from tests.benchmarks.child import warm
from tests.benchmarks.measure import Metric, metric
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import large_config

ROOT = Path(".bench/publish")
LAYERS, SHARDS = 22, 8
MOTO_LAYERS = 6  # moto keeps objects in memory or in temporary files
_MEGA = 1e6
_QUIET = Reporter("publish", quiet=True)


def run(layers: int = LAYERS, moto_layers: int = MOTO_LAYERS) -> dict[str, Metric]:
    """Takes about 20 GB of disk at the most: model, checkpoint's head, and four copies in the store."""
    found: dict[str, Metric] = {}
    for name, endpoint, count in (("rclone", _rclone, layers), ("moto", _moto, moto_layers)):
        shutil.rmtree(ROOT, ignore_errors=True)
        ROOT.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, ROOT, ignore_errors=True)
            env = stack.enter_context(endpoint())
            stack.enter_context(_environment({**env, "FASTMTP_CACHE_DIR": str(ROOT / "cache")}))
            found |= {f"{name}: {what}": value for what, value in _measure(count).items()}
    return found


@contextlib.contextmanager
def _rclone() -> Iterator[Mapping[str, str]]:
    with services.s3_endpoint(ROOT, key_id="BENCHKEY12345678", secret="bench", buckets=["models"]) as server:
        server.wait()
        yield server.env


@contextlib.contextmanager
def _moto() -> Iterator[Mapping[str, str]]:
    url = f"http://127.0.0.1:{procs.free_port()}"
    argv = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    env = {"AWS_ENDPOINT_URL_S3": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    env |= {"AWS_DEFAULT_REGION": "us-east-1"}
    with procs.spawn(argv, log=ROOT / "moto.log") as child, _environment(env):
        procs.wait_until(lambda: _answers(url), child, what="moto", log=ROOT / "moto.log", timeout=60)
        _client().create_bucket(Bucket="models")
        yield env


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/moto-api/", timeout=5, trust_env=False).status_code == 200
    return False


def _client() -> Any:
    return boto3.client("s3", config=Config(s3={"addressing_style": "path"}))


def _measure(layers: int) -> dict[str, Metric]:
    config = large_config(layers=layers, num_experts=16, vocab_size=65536)
    model = write(ROOT / "model", family="qwen3-next", config=config, plan=Plan(shards=SHARDS, head="own file"))
    warm(model)
    seconds: dict[str, float] = {}
    sent: dict[str, int] = {}
    with _measured("loop", seconds, sent):
        _upload_files(model)
    # What ours does besides, so that both have proved what is there.
    with _measured("reading back", seconds, sent):
        _compare_all(model)
    for path in model.iterdir():
        _client().delete_object(Bucket="models", Key=f"loop/{path.name}")
    with _measured("first", seconds, sent):
        digests = sha256_all(sorted(path for path in model.iterdir()))
        files = {path.name: FileEntry(size=path.stat().st_size, sha256=digests[path]) for path in digests}
        publish(model, "s3://models/base/", "v-base", files, {})
    checkpoint = _stitched(model)
    warm(checkpoint)
    for how in ("refer", "copy"):
        base = "s3://models/base/v-base"
        to = PublishConfig.model_validate({"uri": f"s3://models/{how}/", "base": base, "unchanged": how})
        with _measured(how, seconds, sent):
            receipt = publish_checkpoint(checkpoint, to, ROOT / f"receipt-{how}", {}, _QUIET)
        manifest = storage.latest(to.uri)
        if manifest is None or storage.verify(to.uri, manifest) != len(receipt.summary["artifacts"]):
            raise RuntimeError(f"{how}: what was published is not whole")
    touched = (checkpoint / Plan.head_file).stat().st_size / _MEGA
    loop = seconds["loop"]
    found = {
        "first upload: time against upload_file": metric(seconds["first"], "s", peer=loop, goal=1.0),
        "first upload: time against upload_file and reading back": metric(
            seconds["first"], "s", peer=loop + seconds["reading back"], goal=1.0
        ),
    }
    for how, doing in (("copy", "copying"), ("refer", "referring")):
        found |= {
            f"stitched, {doing}: time against upload_file": metric(seconds[how], "s", peer=loop, goal=0.2),
            f"stitched, {doing}: sent against the touched shard": metric(
                sent[how] / _MEGA, "MB", limit=touched, goal=1.01
            ),
        }
    return found


def _upload_files(directory: Path) -> None:
    client = _client()
    for path in sorted(directory.iterdir()):
        client.upload_file(str(path), "models", f"loop/{path.name}", Config=TransferConfig())


def _compare_all(directory: Path) -> None:
    """What the peer sent against what is here, by sha256. Raises RuntimeError."""
    client = _client()
    for path in sorted(directory.iterdir()):
        digest = hashlib.sha256()
        for block in client.get_object(Bucket="models", Key=f"loop/{path.name}")["Body"].iter_chunks(8 << 20):
            digest.update(block)
        if digest.hexdigest() != sha256_file(path):
            raise RuntimeError(f"{path.name} did not arrive whole")


def _stitched(model: Path) -> Path:
    """The model with a head of which every value differs in its lowest bit."""
    extract(model, ROOT / "head", _QUIET)
    content = bytearray((ROOT / "head" / HEAD_FILE).read_bytes())
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    content[begin::2] = content[begin::2].translate(bytes(byte ^ 1 for byte in range(256)))
    (ROOT / "tuned.safetensors").write_bytes(content)
    stitch(model, ROOT / "tuned.safetensors", ROOT / "checkpoint", _QUIET)
    return ROOT / "checkpoint"


@contextlib.contextmanager
def _measured(name: str, seconds: dict[str, float], sent: dict[str, int]) -> Iterator[None]:
    """Take the time, and count what goes into connections as bytes."""
    send: Callable[..., None] = http.client.HTTPConnection.send
    count = 0

    def counting(self: http.client.HTTPConnection, data: object) -> None:
        nonlocal count
        count += len(data) if isinstance(data, bytes | bytearray | memoryview) else 0
        send(self, data)

    os.sync()
    http.client.HTTPConnection.send = counting  # type: ignore[method-assign]
    begun = time.perf_counter()
    try:
        yield
    finally:
        seconds[name], sent[name] = time.perf_counter() - begun, count
        http.client.HTTPConnection.send = send  # type: ignore[method-assign]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
