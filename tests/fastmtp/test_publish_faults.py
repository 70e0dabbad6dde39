"""Publishing through what goes wrong on the way, against two real endpoints; and what is sent, counted on the wire."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from fastmtp import storage
from fastmtp.errors import DestinationError, IntegrityError
from fastmtp.stores import sending
from fastmtp.stores.base import Unfinished, open_store
from fastmtp.stores.s3 import TRIAL
from fastmtp.upload import Options, publish
from tests.conftest import S3Server
from tests.fastmtp.s3proxy import Proxy, Request, proxy
from tests.fastmtp.test_storage import MEBI, Result, entries, make_bucket, use

SHARD = "v-1/a.safetensors"
KILLS = 10  # on each of two endpoints


CHECKING = pytest.mark.parametrize("store", ["rclone", "checking"], indirect=True)


@pytest.fixture(params=["rclone", "moto"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of an endpoint; `checking` refuses bodies without their checksum, as Amazon's does."""
    server: S3Server = request.getfixturevalue("s3_server" if request.param == "rclone" else "moto_server")
    with proxy(server.url) as found:
        found.name = request.param
        found.checks = request.param == "checking"
        use(S3Server(found.url, {**server.env, "AWS_ENDPOINT_URL_S3": found.url}, server.directory), monkeypatch)
        monkeypatch.setenv("FASTMTP_S3_PART_SIZE", "5MiB")
        make_bucket()
        found.requests.clear()
        yield found


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"s3://models/{tmp_path.name}/"


@pytest.fixture
def result(tmp_path: Path) -> Result:
    directory = tmp_path / "result"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(os.urandom(11 * MEBI))
    (directory / "b.safetensors").write_bytes(os.urandom(6 * MEBI))
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory, entries(directory)


def once(*faults: tuple[str, Any]) -> Any:
    """A fault for the first request that each condition holds of."""
    left, lock = list(faults), threading.Lock()

    def choose(request: Request) -> str:
        with lock:
            for fault in left:
                if fault[1](request):
                    left.remove(fault)
                    return fault[0]
        return "pass"

    return choose


def part(number: int) -> Any:
    return lambda request: request.method == "PUT" and request.part == number and request.key.endswith(SHARD)


def completing(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


def is_whole(uri: str, version: str = "v-1") -> bool:
    manifest = storage.latest(uri)
    assert manifest and manifest["version"] == version
    assert not open_store(uri).unfinished("") and not open_store(uri).objects(".fastmtp/")
    return storage.verify(uri, manifest) == len(manifest["files"])


@CHECKING
def test_what_passes_is_got_over_in_one_run(store: Proxy, uri: str, result: Result) -> None:
    """SlowDown, dropped connections before and after a request arrived, and a part that arrives damaged."""
    store.fault = once(
        ("slow down", part(1)), ("drop", part(2)), ("spoil", part(3)), ("drop answer", completing),
        ("drop answer", lambda request: request.key.endswith("latest.json") and request.method == "PUT"),
        ("drop answer", lambda request: request.key.endswith("v-1/manifest.json") and request.method == "PUT"),
    )  # fmt: skip
    publish(result[0], uri, "v-1", result[1], {})
    assert is_whole(uri)


@CHECKING
def test_credentials_that_expire_fail_the_job_which_goes_on_later(store: Proxy, uri: str, result: Result) -> None:
    """Case U3: an expired token on part 2 is never a success; what was sent by then is not sent again."""
    store.fault = lambda request: "expired" if part(2)(request) else "pass"
    with pytest.raises(DestinationError, match="credentials: ExpiredToken.*Renew the credentials"):
        publish(result[0], uri, "v-1", result[1], {})
    assert storage.latest(uri) is None and open_store(uri).head(SHARD) is None
    store.fault = lambda _request: "pass"
    publish(result[0], uri, "v-1", result[1], {})
    assert is_whole(uri)
    sent = {key.rpartition("/")[2]: count for key, count in store.sent.items()}
    assert {name: sent[name] for name in ("a.safetensors", "b.safetensors")} == {
        name: result[1][name].size for name in ("a.safetensors", "b.safetensors")
    }


@CHECKING
@pytest.mark.parametrize("fault", ["spoil", "frame"])
def test_bytes_that_arrive_as_others_fail_the_job(store: Proxy, uri: str, result: Result, fault: Any) -> None:
    """Case U2: a store, or something before it, that alters what is sent, or keeps the framing with it."""
    store.fault = lambda request: fault if request.method == "PUT" and request.key.endswith(".safetensors") else "pass"
    with pytest.raises(IntegrityError, match="remote bytes differ"):
        publish(result[0], uri, "v-1", result[1], {})
    assert storage.latest(uri) is None
    store.fault = lambda _request: "pass"
    publish(result[0], uri, "v-1", result[1], {})
    assert is_whole(uri)


def test_a_store_that_gives_back_other_bytes_gets_no_checkpoint(store: Proxy, uri: str, result: Result) -> None:
    """Whatever its ETags say: they are of what it was sent."""
    store.fault = lambda request: "misread" if request.method == "GET" and TRIAL in request.key else "pass"
    with pytest.raises(DestinationError, match="gave back 16 bytes that are not the 16 it was sent"):
        publish(result[0], uri, "v-1", result[1], {})
    assert not any(key.endswith(".safetensors") for key in store.sent)


def test_framing_in_a_store_that_echoes_what_it_is_told(store: Proxy, uri: str, result: Result) -> None:
    """Case U2, where neither checksum nor ETag is of use: what is there is read back."""
    store.checks = False
    target = open_store(uri)
    target.checks_sums, target.etags_are_md5 = False, False  # type: ignore[attr-defined]
    path, entry = result[0] / "b.safetensors", result[1]["b.safetensors"]
    assert entry.sha256
    target.send("plain", path, entry.sha256, [], lambda _count: None)
    store.fault = lambda request: "spoil" if request.part == 2 else "pass"
    with pytest.raises(IntegrityError, match="remote bytes differ"):
        target.send("spoilt", path, entry.sha256, [], lambda _count: None)


def test_killed_at_any_moment(store: Proxy, uri: str, result: Result) -> None:
    """kill -9 with the nth request: nothing partial shows, the next run completes it and sends nothing twice."""
    (result[0] / "a.safetensors").write_bytes(os.urandom(5 * MEBI + 9))
    (result[0] / "b.safetensors").write_bytes(os.urandom(MEBI))
    files = entries(result[0])
    helper = subprocess.Popen(
        [sys.executable, "-m", "tests.fastmtp.killable", str(result[0])], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert helper.stdin and helper.stdout
    choose = random.Random(0)
    try:
        for number in range(KILLS):
            place = f"{uri}{number}/"
            kill_after(store, helper, place, choose.randrange(2, 55), choose.choice(["pass", "drop"]))
            seen = storage.latest(place)
            assert seen is None or storage.verify(place, seen) == 4
            store.fault = lambda _request: "pass"
            publish(result[0], place, "v-1", files, {})
            assert is_whole(place)
            for name, entry in files.items():
                key = f"{place.removeprefix('s3://')}v-1/{name}"
                assert store.sent[key] == entry.size, (number, name)
    finally:
        helper.stdin.close()
        helper.stdout.close()
        helper.wait(20)


def kill_after(store: Proxy, helper: subprocess.Popen[str], place: str, requests: int, then: Any) -> None:
    """Let the helper publish, and kill it with one of its requests; that one may still arrive."""
    assert helper.stdin and helper.stdout
    known, left, pid = threading.Event(), [requests], 0

    def fault(_request: Request) -> Any:
        left[0] -= 1
        if left[0] == 0:
            known.wait(20)
            os.kill(pid, signal.SIGKILL)
            return then
        return "pass"

    store.fault = fault
    helper.stdin.write(place + "\n")
    helper.stdin.flush()
    pid = int(helper.stdout.readline())
    known.set()
    assert helper.stdout.readline() == "ended\n"
    store.settle()


def test_own_leftovers_go_and_others_stay(store: Proxy, uri: str, result: Result, tmp_path: Path) -> None:
    """Case U1: uploads of a run that was killed, of a version that nobody publishes any more; and somebody else's."""
    store.fault = lambda request: "expired" if part(3)(request) else "pass"
    with pytest.raises(DestinationError):
        publish(result[0], uri, "v-1", result[1], {})
    store.fault = lambda _request: "pass"
    target: Any = open_store(uri)
    alien = target.call("create_multipart_upload", Key=target.full("v-1/somebody-elses"))["UploadId"]
    assert len(target.unfinished("")) >= 2
    (result[0] / "config.json").write_text("[]")
    publish(result[0], uri, "v-2", entries(result[0]), {})
    assert [item.token for item in target.unfinished("")] == [alien]
    assert not target.objects("v-1/")
    target.abort(Unfinished("v-1/somebody-elses", alien))
    assert is_whole(uri, "v-2")


def test_only_what_the_base_lacks_is_sent(store: Proxy, uri: str, result: Result) -> None:
    """The base was put there by somebody else's tool, in other parts; one shard of the result differs from it."""
    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}))
    prefix = uri.removeprefix("s3://models/")
    for name in result[1]:
        client.upload_file(str(result[0] / name), "models", f"{prefix}base/{name}")
    (result[0] / "b.safetensors").write_bytes(os.urandom(6 * MEBI))
    store.sent.clear()
    publish(result[0], f"{uri}out", "v-1", entries(result[0]), {}, options=Options(base=f"{uri}base"))
    assert sum(store.sent.values()) <= 1.01 * 6 * MEBI
    assert is_whole(f"{uri}out")
    # A version later: nothing but what is small.
    store.sent.clear()
    (result[0] / "config.json").write_text("[]")
    publish(result[0], f"{uri}out", "v-2", entries(result[0]), {})
    assert sum(store.sent.values()) < 8192
    assert is_whole(f"{uri}out", "v-2")


def test_what_is_too_large_for_one_copy(
    store: Proxy, uri: str, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied in parts where the store answers that properly, sent where it does not; no upload is left either way."""
    publish(result[0], uri, "v-1", result[1], {})
    monkeypatch.setattr(sending, "COPY_LIMIT", 7 * MEBI)
    monkeypatch.setattr(sending, "_COPY_PART", 5 * MEBI)
    store.sent.clear()
    publish(result[0], uri, "v-2", result[1], {})
    assert is_whole(uri, "v-2")
    assert [request for request in store.requests if request.copies and request.part]
    large = sum(count for key, count in store.sent.items() if key.endswith("a.safetensors"))
    assert large == (0 if store.name == "moto" else 11 * MEBI)


@CHECKING
def test_verifying_reads_nothing_that_the_store_keeps_a_checksum_of(store: Proxy, uri: str, result: Result) -> None:
    manifest = publish(result[0], uri, "v-1", result[1], {})
    found = storage.check_version(uri, manifest)
    shards = sum(entry.size for name, entry in result[1].items() if name.endswith(".safetensors"))
    if store.checks:
        assert found.by_checksum == 2 and found.bytes_read == found.bytes - shards
    else:
        assert found.by_checksum == 0 and found.bytes_read == found.bytes
    assert storage.check_version(uri, manifest, read=True).bytes_read == found.bytes
    open_store(uri).put(SHARD, b"other")
    with pytest.raises(IntegrityError, match=r"a\.safetensors"):
        storage.check_version(uri, manifest)


def test_pointers_move_only_from_where_they_were_seen(store: Proxy, uri: str) -> None:
    """By condition where the store minds it, by reading back where it does not."""
    target = open_store(uri)
    storage.point(target, "latest", "v-1")
    turns = iter(["v-2", "v-3"])

    def meddle(request: Request) -> Any:
        if request.method == "PUT" and request.key.endswith("aliases/a.json") and (version := next(turns, None)):
            other = {"Key": target.full("aliases/a.json"), "Body": f'{{"version": "{version}"}}'.encode()}  # type: ignore[attr-defined]
            storage.s3_client().put_object(Bucket="models", **other)
        return "pass"

    store.fault = meddle
    storage.point(target, "a", "v-1")
    assert storage.pointers(target) == {"latest": "v-1", "a": "v-1"}


def test_bandwidth_is_kept_to(store: Proxy, uri: str, result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMTP_S3_BANDWIDTH", "20MiB")
    begun = os.times().elapsed
    publish(result[0], uri, "v-1", result[1], {})
    assert os.times().elapsed - begun > 17 / 20 * 0.9
    assert is_whole(uri)
