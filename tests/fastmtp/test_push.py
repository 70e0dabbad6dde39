"""Publishing on the hub: one commit, nothing of it before, nothing twice; and what is there as the incumbent."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from fastmtp import storage
from fastmtp.compare import compare
from fastmtp.config import PublishConfig
from fastmtp.errors import ConfigError, DestinationError, IntegrityError
from fastmtp.policy import Policy
from fastmtp.progress import Reporter
from fastmtp.publish import fetch_incumbent, identity, publish_checkpoint
from fastmtp.push import push
from fastmtp.stage import Manifest
from tests.fastmtp.conftest import use_hub
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.test_cli import fastmtp
from tests.fastmtp.test_models_in_stores import stitched
from tests.fastmtp.test_storage import entries
from tests.fastmtp.writable_hub import WritableHub, serve_writable

# huggingface_hub's own, when it sends a file without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

QUIET = Reporter("publish", quiet=True)
NAME = "org/tuned"
URI = f"hf://{NAME}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    from huggingface_hub import constants

    monkeypatch.setenv("FASTMTP_CACHE_DIR", str(tmp_path / "digests"))
    # Without Xet, which speaks to servers of another kind.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serve_writable() as found, use_hub(found.url, tmp_path / "cache", monkeypatch):
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    found = write(tmp_path / "model", family="qwen3-next", plan=Plan(shards=3, head="own file"))
    (found / "README.md").write_text("---\nlicense: apache-2.0\n---\nWhat it is.\n")
    return found


def publish(checkpoint: Path, place: Path, uri: str = URI) -> Manifest:
    about = {"verifier": identity(checkpoint)}
    return publish_checkpoint(checkpoint, PublishConfig(uri=uri), place, about, QUIET)


def sent(hub: WritableHub) -> list[str]:
    return [request for request in hub.requests if request.startswith("PUT")]


def test_one_commit_of_a_private_repository(hub: WritableHub, model: Path, tmp_path: Path) -> None:
    checkpoint = stitched(model, tmp_path)
    receipt = publish(checkpoint, tmp_path / "receipt")
    repository = hub.repositories[NAME]
    assert repository.private and len(repository.commits) == 2
    commit = repository.branches["main"]
    assert receipt.summary["uri"] == f"hf://{NAME}@{commit}"
    shards = {path.name for path in checkpoint.glob("*.safetensors")}
    assert {one["uri"] for one in receipt.summary["artifacts"]} >= {f"hf://{NAME}@{commit}/{name}" for name in shards}
    files = repository.files("main")
    assert files is not None
    for name in shards:
        digest = files[name].decode()
        assert (
            digest == hashlib.sha256(repository.lfs[digest]).hexdigest()
            and repository.lfs[digest] == (checkpoint / name).read_bytes()
        )
    assert files["config.json"] == (checkpoint / "config.json").read_bytes()
    assert json.loads(files["manifest.json"])["verifier"] == identity(model)
    # The same again is found there; another head is one shard and one commit more.
    hub.requests.clear()
    assert publish(checkpoint, tmp_path / "again").summary["uri"] == receipt.summary["uri"]
    assert not [request for request in hub.requests if not request.startswith("GET")]
    publish(stitched(checkpoint, tmp_path / "next"), tmp_path / "third")
    assert len(sent(hub)) == 1 and len(repository.commits) == 3


def test_an_upload_that_fails_in_the_middle(hub: WritableHub, model: Path, tmp_path: Path) -> None:
    hub.create(NAME, {"README.md": b"somebody's", "old.safetensors": b""})
    hub.repositories[NAME].lfs[""] = b"old weights"
    before = dict(hub.repositories[NAME].branches)
    checkpoint = stitched(model, tmp_path)
    hub.broken = {3}
    with pytest.raises(DestinationError, match=r"the hub refuses.*Run it again") as caught:
        publish(checkpoint, tmp_path / "receipt", f"{URI}@tuned")
    assert "hf_secret" not in str(caught.value)
    assert hub.repositories[NAME].branches == before and len(hub.repositories[NAME].commits) == 1
    hub.broken = set()
    receipt = publish(checkpoint, tmp_path / "receipt", f"{URI}@tuned")
    assert set(hub.repositories[NAME].branches) == {"main", "tuned"}
    assert receipt.summary["uri"].endswith(hub.repositories[NAME].branches["tuned"])
    # Once each, but for the one that was refused.
    sizes = sorted(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.glob("*.safetensors")}
    assert hub.sent.keys() == digests and len(sent(hub)) == len(sizes) + 1
    there = hub.repositories[NAME].files("tuned") or {}
    assert "old.safetensors" not in there and there["README.md"] == (checkpoint / "README.md").read_bytes()
    assert (hub.repositories[NAME].files("main") or {})["README.md"] == b"somebody's"


def test_what_arrives_is_proved(hub: WritableHub, tmp_path: Path) -> None:
    directory = tmp_path / "result"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(os.urandom(1000))
    (directory / "config.json").write_text("{}")
    files = entries(directory)
    hub.spoil = True
    with pytest.raises(IntegrityError, match=r"a\.safetensors did not arrive"):
        push(directory, URI, "v-1", files, {})
    hub.spoil = False
    (directory / "config.json").write_text("[]")
    with pytest.raises(IntegrityError, match=r"config\.json is not what its manifest says"):
        push(directory, f"{URI}-2", "v-1", files, {})


def test_somebody_who_commits_meanwhile(
    hub: WritableHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.create(NAME)
    from huggingface_hub import HfApi

    upload = HfApi.preupload_lfs_files

    def interrupted(*arguments: object, **options: object) -> None:
        if len(hub.repositories[NAME].commits) == 1:
            hub.repositories[NAME].commit("main", {"theirs": b""})
        upload(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(HfApi, "preupload_lfs_files", interrupted)
    with pytest.raises(DestinationError, match="Somebody else committed"):
        publish(model_as_result(model, tmp_path), tmp_path / "receipt")
    assert hub.repositories[NAME].files("main") == {"theirs": b""}
    publish(model_as_result(model, tmp_path), tmp_path / "receipt")
    assert "theirs" in (hub.repositories[NAME].files("main") or {})


def model_as_result(model: Path, place: Path) -> Path:
    return place / "checkpoint" if (place / "checkpoint").exists() else stitched(model, place)


def test_the_incumbent(hub: WritableHub, model: Path, tmp_path: Path) -> None:
    assert not fetch_incumbent(URI, model, tmp_path / "none", QUIET)
    hub.create(NAME)
    assert not fetch_incumbent(URI, model, tmp_path / "empty", QUIET)
    checkpoint = stitched(model, tmp_path)
    publish(checkpoint, tmp_path / "receipt")
    assert not fetch_incumbent(f"{URI}@canary", model, tmp_path / "branch", QUIET)
    hub.requests.clear()
    assert fetch_incumbent(URI, model, tmp_path / "incumbent", QUIET)
    assert compare(checkpoint, tmp_path / "incumbent", QUIET).verdict == "identical"
    # Shards that are the model's own are linked.
    for shard in model.glob("model-*.safetensors"):
        assert shard.samefile(tmp_path / "incumbent" / shard.name)
    other = write(tmp_path / "other", family="qwen3.5-moe", plan=Plan(shards=2))
    assert not fetch_incumbent(URI, other, tmp_path / "others", QUIET)


def test_probe_makes_nothing(hub: WritableHub, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.probe(URI)
    storage.probe("hf://me/tuned@canary")
    with pytest.raises(DestinationError, match="may not make it in theirs"):
        storage.probe("hf://theirs/tuned")
    hub.create(NAME)
    storage.probe(URI)
    hub.role = "read"
    with pytest.raises(DestinationError, match="may only read"):
        storage.probe(URI)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(DestinationError, match="no token"):
        storage.probe(URI)
    assert list(hub.repositories) == [NAME] and not [one for one in hub.requests if not one.startswith("GET")]


def test_the_command(hub: WritableHub, model: Path, tmp_path: Path) -> None:
    checkpoint = stitched(model, tmp_path)
    env = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    done = fastmtp("publish", str(checkpoint), "--to", f"{URI}@canary", "--json", cwd=None, **env)
    assert done.returncode == 0 and "hf_secret" not in done.stdout + done.stderr, done.stderr
    assert json.loads(done.stdout)["summary"]["uri"] == f"{URI}@{hub.repositories[NAME].branches['canary']}"


def test_what_is_published_there_is_listed_verified_and_fetched(hub: WritableHub, model: Path, tmp_path: Path) -> None:
    checkpoint = stitched(model, tmp_path)
    publish(checkpoint, tmp_path / "receipt")
    publish(stitched(checkpoint, tmp_path / "next"), tmp_path / "again")
    env = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return fastmtp(*arguments, "--json", cwd=None, **env)

    newest, oldest = json.loads(run("versions", URI).stdout)["versions"]
    commits = hub.repositories[NAME].log("main")
    assert [newest["uri"], oldest["uri"]] == [f"{URI}@{one['id']}" for one in commits[:2]]
    assert (newest["names"], oldest["names"]) == (["main"], []) and newest["version"] != oldest["version"]
    assert "Tag the commit" in run("versions", URI, "--keep", "1").stderr
    # Large files by the digest that the hub states, small ones by reading them.
    files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
    small = {name for name in files if not name.endswith(".safetensors")}
    found = json.loads(run("verify", oldest["uri"]).stdout)
    assert (found["version"], found["files"], found["by_checksum"]) == (
        oldest["version"], len(files), len(files) - len(small),
    )  # fmt: skip
    assert found["bytes_read"] == sum((checkpoint / name).stat().st_size for name in small)
    assert run("fetch", oldest["uri"], str(tmp_path / "fetched")).returncode == 0
    assert compare(checkpoint, tmp_path / "fetched", QUIET).verdict == "identical"
    assert json.loads((tmp_path / "fetched" / ".fastmtp-source.json").read_bytes())["version"] == oldest["version"]
    for digest, data in hub.repositories[NAME].lfs.items():
        hub.repositories[NAME].lfs[digest] = data[:-1] + bytes([data[-1] ^ 1])
    wrong = run("verify", URI)
    assert wrong.returncode == 1 and "Not what the manifest says" in wrong.stderr


def test_what_a_job_may_name() -> None:
    policy = Policy(destinations=("hf://org/", "hf://team/one"))
    for uri in (URI, f"{URI}@canary", "hf://team/one@canary"):
        policy.require_destination(PublishConfig(uri=uri).uri, "/publish/uri")
    for uri in ("hf://team/one-more", "hf://organisation/x", "s3://org/x"):
        with pytest.raises(ConfigError, match="outside"):
            policy.require_destination(uri, "/publish/uri")
    for wrong in ("hf://org", "hf://org/a/b", "hf://org/../x", f"{URI}@", f"{URI}@{'0' * 40}", "hf://user:pw@org/x"):
        with pytest.raises(ValidationError, match="hf://org/name"):
            PublishConfig(uri=wrong)
    with pytest.raises(ValidationError, match="alias, keep: only for s3"):
        PublishConfig(uri=URI, alias="canary", keep=3)
