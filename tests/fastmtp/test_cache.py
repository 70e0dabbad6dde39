"""The cache of fetched models: what goes, and that nothing in use does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastmtp import cache
from fastmtp.errors import ConfigError
from fastmtp.pipeline import resolve_model
from fastmtp.stores.base import open_store
from tests.conftest import S3Server
from tests.fastmtp.test_storage import use

KILO = 1 << 10
PROGRAM = """
import sys
from pathlib import Path
from fastmtp import cache
cache.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three models of 100 KiB: `old` was used longest ago, `new` last; of `half` a part was fetched, long ago."""
    monkeypatch.setenv("FASTMTP_CACHE_DIR", str(tmp_path))
    root = cache.models_directory()
    for age, name in enumerate(("new", "middle", "old", ".half.partial")):
        (root / name).mkdir(parents=True)
        (root / name / "a.safetensors").write_bytes(os.urandom(100 * KILO))
        used = root / f".{name.strip('.').removesuffix('.partial')}.use"
        used.touch()
        os.utime(used, (1e9 - age, 1e9 - age))
    return root


def left(models: Path) -> set[str]:
    return {path.name for path in models.iterdir() if path.is_dir()}


def test_without_a_limit_everything_stays(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.make_room(models / "coming", 1 << 60) == []
    monkeypatch.setenv(cache.SETTING, "much")
    with pytest.raises(ConfigError, match="FASTMTP_CACHE_SIZE=much"):
        cache.make_room(models / "coming", 1)


def test_who_was_used_longest_ago_goes_whole(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.SETTING, "450KiB")
    assert cache.make_room(models / "coming", 100 * KILO) == [models / "half"]
    assert left(models) == {"new", "middle", "old"}
    monkeypatch.setenv(cache.SETTING, "350KiB")
    assert cache.make_room(models / "coming", 100 * KILO) == [models / "old"]
    # What comes counts, but is not taken away for itself.
    assert cache.make_room(models / "middle", 100 * KILO) == []
    cache.hold(models / "middle")
    monkeypatch.setenv(cache.SETTING, "150KiB")
    assert cache.make_room(models / "coming", 50 * KILO) == [models / "new"]
    assert left(models) == {"middle"}


def test_what_a_living_process_uses_or_fetches_stays(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.SETTING, "1KiB")
    arguments = [sys.executable, "-c", PROGRAM, str(models / "old")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout and child.stdin and child.stdout.readline() == "held\n"
        with cache._only(cache.lock_of(models / "middle")) as alone:
            assert alone
            assert set(cache.make_room(models / "coming", 0)) == {models / "half", models / "new"}
        child.kill()
    assert left(models) == {"old", "middle"}
    assert set(cache.make_room(models / "coming", 0)) == {models / "old", models / "middle"}


def test_a_model_of_a_job_makes_room_for_itself(
    models: Path, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(s3_server, monkeypatch)
    uri = f"s3://models/{tmp_path.name}/m"
    open_store(uri).put("model.safetensors", bytes(200 * KILO))
    monkeypatch.setenv(cache.SETTING, "350KiB")
    found = resolve_model(uri)
    assert left(models) == {"new", found.name}
    assert (found / "model.safetensors").stat().st_size == 200 * KILO and resolve_model(uri) == found
