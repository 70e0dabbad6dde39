"""Properties over random layouts: what goes in comes out, a kill leaves nothing half done, damage is never read."""

from __future__ import annotations

import json
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from fastmtp.checkpoint import open_checkpoint
from fastmtp.compare import compare
from fastmtp.errors import CheckpointError, FastMTPError
from fastmtp.extract import HEAD_FILE, extract
from fastmtp.inspection import inspect
from fastmtp.native import find_head
from fastmtp.progress import Reporter
from fastmtp.stage import MANIFEST
from fastmtp.stitch import stitch
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import VARIANTS, WRAPPED, small_config

QUIET = Reporter("stitch", quiet=True)
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of `write`: any family, any placement of tensors, any index."""
    family, layout = draw(st.sampled_from(VARIANTS))
    wrapped = family in WRAPPED and draw(st.booleans())
    plan = Plan(
        shards=draw(st.integers(1, 5)),
        head=draw(st.sampled_from(["own file", "last shard", "spread"])),
        head_file=draw(st.sampled_from(["mtp.safetensors", "model-mtp-00001.safetensors", "a.safetensors"])),
        index=draw(st.sampled_from(["whole", "whole", "without the head", "partial", "absent"])),
        copies=draw(st.booleans()),
        dtype=draw(st.sampled_from(["BF16", "F16", "F32"])),
    )
    config = small_config(family, wrapped=wrapped, tied=draw(st.booleans()))
    return {"family": family, "layout": layout, "config": config, "plan": plan, "seed": draw(st.integers(0, 99))}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != MANIFEST}


def as_safetensors_reads(directory: Path) -> dict[str, bytes]:
    """Every tensor, as the reference implementation reads it."""
    found = {}
    for shard in directory.glob("*.safetensors"):
        with safe_open(shard, framework="np") as file:
            data = shard.read_bytes()
            start = 8 + struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8:start])
            for key in file.keys():  # noqa: SIM118
                begin, end = header[key]["data_offsets"]
                found[key] = data[start + begin : start + end]
    return found


def changed_head(head: Path, seed: int) -> Path:
    """The head with other bytes in every tensor: the lowest bit of each value's first byte turned."""
    path = head.with_suffix(".safetensors")
    data = bytearray((head / HEAD_FILE).read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    rng = random.Random(seed)
    for entry in json.loads(data[8:start]).values():
        if "data_offsets" in entry:
            data[start + entry["data_offsets"][0]] ^= 1 << rng.randrange(4)
    path.write_bytes(data)
    return path


@settings(RELAXED, max_examples=60)
@given(made=checkpoints(), mode=st.sampled_from(["auto", "hardlink", "copy"]), seed=st.integers(0, 99))
def test_round_trip(made: dict[str, object], mode: str, seed: int) -> None:
    with scratch() as root:
        model = write(root / "m", **made)  # type: ignore[arg-type]
        before = contents(model)
        extract(model, root / "head", Reporter("extract", quiet=True))
        stitch(model, root / "head", root / "same", QUIET, mode=mode)  # type: ignore[arg-type]
        assert contents(root / "same") == before
        stitch(model, changed_head(root / "head", seed), root / "out", QUIET, mode=mode)  # type: ignore[arg-type]
        assert contents(model) == before
        head = {entry.key for entry in find_head(open_checkpoint(model)).tensors.values()}
        old, new = as_safetensors_reads(model), as_safetensors_reads(root / "out")
        assert old.keys() == new.keys()
        assert {key for key in old if old[key] != new[key]} == head
        assert compare(model, root / "out", QUIET).verdict == "exactly the head"
        stitch(model, root / "head", root / "mended", QUIET, mode=mode, mend=True)  # type: ignore[arg-type]
        mended = inspect(root / "mended")
        assert not [fault for fault in mended.faults if fault.level != "warning"]
        assert compare(model, root / "mended", QUIET).differences == []


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, bytes]]:
    """A checkpoint, its first shard's bytes, and the head's tensors."""
    model = write(tmp_path_factory.mktemp("damage") / "m", family="qwen3.5-moe", plan=Plan(shards=2, head="spread"))
    shard = sorted(model.glob("*.safetensors"))[0]
    checkpoint = open_checkpoint(model)
    head = {key: checkpoint.read(entry) for key, entry in find_head(checkpoint).tensors.items()}
    return model, shard.read_bytes(), head


@settings(RELAXED, max_examples=250)
@given(draw=st.data(), kind=st.sampled_from(["flip", "cut", "remove", "repeat", "insert"]), with_index=st.booleans())
def test_damage_to_a_header_is_never_read(
    one_file: tuple[Path, bytes, dict[str, bytes]], draw: st.DataObject, kind: str, with_index: bool
) -> None:
    """Either an error that says so, or, where the damage does not matter, exactly the head that was there."""
    model, good, head = one_file
    header = 8 + struct.unpack("<Q", good[:8])[0]
    place = draw.draw(st.integers(0, header - 1))
    damaged = {
        "flip": lambda: good[:place] + bytes([good[place] ^ (1 << draw.draw(st.integers(0, 7)))]) + good[place + 1 :],
        "cut": lambda: good[:place],
        "remove": lambda: good[:place] + good[place + 1 :],
        "repeat": lambda: good[: place + 1] + good[place:],
        "insert": lambda: good[:place] + bytes([draw.draw(st.integers(0, 255))]) + good[place:],
    }[kind]()
    with scratch() as root:
        copy = Path(shutil.copytree(model, root / "m"))
        sorted(copy.glob("*.safetensors"))[0].write_bytes(damaged)
        if not with_index:
            (copy / "model.safetensors.index.json").unlink()
        assert inspect(copy).model  # a report, whatever the damage
        try:
            checkpoint = open_checkpoint(copy)
            found = {key: checkpoint.read(entry) for key, entry in find_head(checkpoint).tensors.items()}
        except CheckpointError:
            return
        assert found == head


_KILLED = """
import os, signal, sys
from pathlib import Path
from fastmtp.progress import Reporter
from fastmtp.stitch import stitch

count, last = 0, int(sys.argv[4])
watched = {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.utime", "fcntl.flock"}

def watch(event, _arguments):
    global count
    if event in watched:
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

def main():
    sys.addaudithook(watch)
    stitch(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), Reporter("stitch", quiet=True), replace=True)
    print(count)

main()
"""


def killed_at(event: int, model: Path, head: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Stitch in a process of its own that is killed, hard, at its n-th operation on files; 0 for never."""
    command = [sys.executable, "-c", _KILLED, str(model), str(head), str(out), str(event)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_kill_at_any_moment_leaves_nothing_half_done(earlier: bool, tmp_path: Path) -> None:
    """Case S3. At random file operations; `earlier`: another head's result stood under the name before."""
    model = write(tmp_path / "m", family="qwen3.5", plan=Plan(shards=3, head="spread"))
    before = contents(model)
    extract(model, tmp_path / "head", Reporter("extract", quiet=True))
    head = changed_head(tmp_path / "head", 1)
    whole = killed_at(0, model, head, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    expected, events = contents(tmp_path / "whole"), int(whole.stdout)
    out = tmp_path / "out"
    rng = random.Random(earlier)
    # The last dozen events are those in which the result gets its name.
    moments = [*rng.sample(range(1, events - 12), 5), *rng.sample(range(events - 12, events + 1), 5)]
    killed = 0
    for moment in moments:
        shutil.rmtree(out, ignore_errors=True)
        if earlier:
            stitch(model, tmp_path / "head", out, QUIET)
        killed += killed_at(moment, model, head, out).returncode == -signal.SIGKILL
        if out.exists():
            assert (out / MANIFEST).is_file()
            assert contents(out) in ([expected, before] if earlier else [expected])
        assert contents(model) == before
        again = killed_at(0, model, head, out)
        assert again.returncode == 0, again.stderr
        assert contents(out) == expected
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")]
    assert killed >= len(moments) - 2


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    model = write(tmp_path / "m", family="qwen3.5")
    extract(model, tmp_path / "head", Reporter("extract", quiet=True))

    class Second(Reporter):
        """Starts another stitch to the same place in the middle of the first."""

        def phase(self, message: str, total: float | None = None, unit: str = "") -> None:
            with pytest.raises(FastMTPError, match=f"Another process is making {tmp_path}/out"):
                stitch(model, tmp_path / "head", tmp_path / "out", QUIET)
            refused.append(message)

    refused: list[str] = []
    stitch(model, tmp_path / "head", tmp_path / "out", Second("stitch", quiet=True))
    assert refused and contents(tmp_path / "out") == contents(model)
