"""Publishing a stitched 4 GB checkpoint whose base is in the same store against boto3's upload_file; a first upload.

The stores are rclone's S3 server and moto's, on this machine. The model was published there before; the checkpoint is
stitched from it with another head, which lies in a file of its own, by links, so that one shard of nine is touched.
Ours runs twice: shards copied by the store (the default), which these servers do by reading and writing them on our
own disk and cores, so that the store's own copies, one after the other, are the limit; and referred to where they lie.
The peer sends the directory file by file, as `upload_file` does by itself: in parts, ten at once.

Seconds are of the calls in one process on a warm page cache, uploads the median of four in turns, the rest once. Ours
include finding out what the store has, claims, manifest and pointer, and proving what arrived; the first upload also
hashes every byte, from cold. The peer proves nothing. What was copied is then fetched from rclone, by ours into a
verified directory, and is on disk in the end by both. Bytes sent are what went into the connections, headers and all.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import statistics
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
from fastmtp.fetch import fetch, find
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
ROUNDS = 4
_MEGA = 1e6
_QUIET = Reporter("publish", quiet=True)


def run(layers: int = LAYERS) -> dict[str, Metric]:
    """Takes about 20 GB of disk at the most: model, checkpoint's head, and copies in the store, moto's in TMPDIR."""
    found: dict[str, Metric] = {}
    for name, endpoint in (("rclone", _rclone), ("moto", _moto)):
        shutil.rmtree(ROOT, ignore_errors=True)
        ROOT.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, ROOT, ignore_errors=True)
            env = stack.enter_context(endpoint())
            stack.enter_context(_environment({**env, "FASTMTP_CACHE_DIR": str(ROOT / "cache")}))
            found |= {f"{name}: {what}": value for what, value in _measure(layers, ranges=name != "moto").items()}
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


def _measure(layers: int, *, ranges: bool) -> dict[str, Metric]:
    """With `ranges`, fetching too: a store may read the whole object for each range."""
    config = large_config(layers=layers, num_experts=16, vocab_size=65536)
    model = write(ROOT / "model", family="qwen3-next", config=config, plan=Plan(shards=SHARDS, head="own file"))
    warm(model)
    taken = _Taken()
    for number in range(ROUNDS):
        # Each goes first as often as the other: what one leaves to be written to disk is paid for by the next.
        for name in ("loop", "first") if number % 2 else ("first", "loop"):
            _upload(name, model, taken, number)
    checkpoint = _stitched(model)
    warm(checkpoint)
    with taken.measured("store's copying"):
        _copy_all(checkpoint)
    _delete_all("copied/")
    with _environment({"FASTMTP_CACHE_DIR": str(ROOT / f"cache-{ROUNDS - 1}")}):
        for how in ("refer", "copy"):
            base = "s3://models/base/v-base"
            to = PublishConfig.model_validate({"uri": f"s3://models/{how}/", "base": base, "unchanged": how})
            with taken.measured(how):
                receipt = publish_checkpoint(checkpoint, to, ROOT / f"receipt-{how}", {}, _QUIET)
            manifest = storage.latest(to.uri)
            if manifest is None or storage.verify(to.uri, manifest) != len(receipt.summary["artifacts"]):
                raise RuntimeError(f"{how}: what was published is not whole")
    if ranges:
        with taken.measured("download"):
            _download_files("copy/", ROOT / "downloaded")
        shutil.rmtree(ROOT / "downloaded")
        # Digests are remembered nowhere, and no file is here already.
        with _environment({"FASTMTP_CACHE_DIR": str(ROOT / "cache-fetch")}), taken.measured("fetch"):
            fetch(find("s3://models/copy/"), ROOT / "fetched", _QUIET)
    return _metrics(taken, (checkpoint / Plan.head_file).stat().st_size)


def _upload(name: str, model: Path, taken: _Taken, number: int) -> None:
    """The model's first upload in round `number`, by ours or by the peer."""
    if name == "loop":
        with taken.measured("loop"):
            _upload_files(model)
        if number == 0:
            # What ours does besides, so that both have proved what is there.
            with taken.measured("reading back"):
                _compare_all(model)
        _delete_all("loop/")
        return
    _delete_all("base/")
    # The digests of every round are found out anew.
    with _environment({"FASTMTP_CACHE_DIR": str(ROOT / f"cache-{number}")}), taken.measured("first"):
        digests = sha256_all(sorted(path for path in model.iterdir()))
        files = {path.name: FileEntry(size=path.stat().st_size, sha256=digests[path]) for path in digests}
        publish(model, "s3://models/base/", "v-base", files, {})


def _metrics(taken: _Taken, touched: int) -> dict[str, Metric]:
    loop, first = taken.seconds("loop"), taken.seconds("first")
    proved = loop + taken.seconds("reading back")
    found = {
        "first upload: time against upload_file": metric(first, "s", peer=loop, goal=1.0),
        "first upload: time against upload_file and reading back": metric(first, "s", peer=proved, goal=1.0),
    }
    for how, doing in (("copy", "copying"), ("refer", "referring")):
        sent = taken.sent[how] / _MEGA
        found |= {
            f"stitched, {doing}: time against upload_file": metric(taken.seconds(how), "s", peer=loop, goal=0.2),
            f"stitched, {doing}: sent against the touched shard": metric(sent, "MB", limit=touched / _MEGA, goal=1.01),
        }
    copying = metric(taken.seconds("copy"), "s", peer=taken.seconds("store's copying"))
    found["stitched, copying: time against the store's copying and nothing else"] = copying
    if "fetch" in taken:
        found["fetching: time against download_file"] = metric(
            taken.seconds("fetch"), "s", peer=taken.seconds("download"), goal=1.0
        )
    return found


def _upload_files(directory: Path) -> None:
    client = _client()
    for path in sorted(directory.iterdir()):
        client.upload_file(str(path), "models", f"loop/{path.name}", Config=TransferConfig())


def _download_files(prefix: str, directory: Path) -> None:
    client = _client()
    directory.mkdir()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="models", Prefix=prefix)
    for item in (item for page in pages for item in page["Contents"]):
        client.download_file("models", item["Key"], str(directory / item["Key"].rpartition("/")[2]))
    os.sync()


def _compare_all(directory: Path) -> None:
    """What the peer sent against what is here, by sha256. Raises RuntimeError."""
    client = _client()
    for path in sorted(directory.iterdir()):
        digest = hashlib.sha256()
        for block in client.get_object(Bucket="models", Key=f"loop/{path.name}")["Body"].iter_chunks(8 << 20):
            digest.update(block)
        if digest.hexdigest() != sha256_file(path):
            raise RuntimeError(f"{path.name} did not arrive whole")


def _copy_all(checkpoint: Path) -> None:
    """The store's own copies of the shards that were not touched, and the one that was: what copying takes at least."""
    client = _client()
    for path in sorted(checkpoint.glob("*.safetensors")):
        if path.name == Plan.head_file:
            client.upload_file(str(path), "models", f"copied/{path.name}")
        else:
            source = {"Bucket": "models", "Key": f"base/v-base/{path.name}"}
            client.copy_object(Bucket="models", Key=f"copied/{path.name}", CopySource=source)


def _delete_all(prefix: str) -> None:
    client = _client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="models", Prefix=prefix)
    for item in [item for page in pages for item in page.get("Contents", ())]:
        client.delete_object(Bucket="models", Key=item["Key"])


def _stitched(model: Path) -> Path:
    """The model with a head of which every value differs in its lowest bit."""
    extract(model, ROOT / "head", _QUIET)
    content = bytearray((ROOT / "head" / HEAD_FILE).read_bytes())
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    content[begin::2] = content[begin::2].translate(bytes(byte ^ 1 for byte in range(256)))
    (ROOT / "tuned.safetensors").write_bytes(content)
    stitch(model, ROOT / "tuned.safetensors", ROOT / "checkpoint", _QUIET)
    return ROOT / "checkpoint"


class _Taken:
    """Seconds, and bytes that went into connections, by what was done."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self.sent: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._seconds

    def seconds(self, name: str) -> float:
        return statistics.median(self._seconds[name])

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[None]:
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
            self._seconds.setdefault(name, []).append(time.perf_counter() - begun)
            self.sent[name] = count
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
