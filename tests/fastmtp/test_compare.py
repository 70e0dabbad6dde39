"""`fastmtp verify`: what differs between two checkpoints, and whether that is exactly the head."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastmtp.checkpoint import INDEX, open_checkpoint
from fastmtp.compare import Comparison, compare
from fastmtp.errors import CheckpointError
from fastmtp.extract import HEAD_FILE, extract
from fastmtp.families import families
from fastmtp.files import LocalFiles
from fastmtp.native import find_head
from fastmtp.progress import Reporter
from fastmtp.stitch import stitch
from tests.fastmtp.faults import FC, FIRST, LAST, drop, rename, store
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import small_config
from tests.fastmtp.test_inspect import fastmtp

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def verify(a: Path | str, b: Path | str) -> Comparison:
    return compare(a, b, Reporter("stitch", quiet=True, label="verify"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The same checkpoint twice, no file shared."""
    a = write(tmp_path / "a", family="qwen3-next")
    return a, Path(shutil.copytree(a, tmp_path / "b"))


def flip(root: Path, *keys: str) -> None:
    """Change the lowest bit of a tensor's first value."""
    checkpoint = open_checkpoint(root)
    for key in keys:
        entry = checkpoint.tensors[key]
        with (root / entry.file).open("r+b") as file:
            file.seek(entry.begin)
            byte = file.read(1)[0]
            file.seek(entry.begin)
            file.write(bytes([byte ^ 1]))


def head_of(root: Path) -> list[str]:
    return sorted(find_head(open_checkpoint(root)).tensors)


VERDICTS: list[tuple[str, int, Callable[[Path], object]]] = [
    ("identical", 0, lambda root: None),
    ("exactly the head", 0, lambda root: flip(root, *head_of(root))),
    ("part of the head", 0, lambda root: flip(root, FC)),
    ("more than the head", 1, lambda root: flip(root, *head_of(root), "model.norm.weight")),
    ("more than the head", 1, lambda root: flip(root, "lm_head.weight")),
    ("more than the head", 1, lambda root: store(FC, "F32", [8, 16], 4)(root)),
    ("more than the head", 1, lambda root: drop("model.layers.0.mlp.gate.", FIRST)(root)),
    ("more than the head", 1, lambda root: store("model.extra", "BF16", [1], 2)(root)),
    ("more than the head", 1, lambda root: (root / "config.json").write_text("{}")),
]


@pytest.mark.parametrize("number", range(len(VERDICTS)))
def test_verdicts(number: int, pair: tuple[Path, Path]) -> None:
    a, b = pair
    verdict, status, change = VERDICTS[number]
    change(b)
    found = verify(a, b)
    assert found.verdict == verdict and found.head == 23
    done = fastmtp("verify", a, b, "--json")
    assert done.returncode == status
    assert Comparison.model_validate_json(done.stdout) == found
    shown = fastmtp("verify", a, b)
    assert shown.returncode == status and (verdict in shown.stdout)
    assert all(one.key in shown.stdout for one in found.differences[:20])


def test_each_difference_is_named(pair: tuple[Path, Path]) -> None:
    a, b = pair
    flip(b, FC, "model.norm.weight")
    store("lm_head.weight", "F16", [16, 8], 2)(b)
    drop("model.layers.1.mlp.gate.weight")(b)
    drop("merges", FIRST)(b)
    (b / "merges.txt").unlink()
    (b / "chat_template.jinja").write_text("other")
    (b / "README.md").write_text("new")
    (b / "more").mkdir()
    (b / "more" / "notes.txt").write_text("x")
    (b / ".hidden").write_text("x")
    found = verify(a, b)
    assert [(one.key, one.what, one.of_head, one.file_a, one.file_b) for one in found.differences] == [
        ("lm_head.weight", "type or shape", False, LAST, LAST),
        ("model.layers.1.mlp.gate.weight", "only in A", False, LAST, None),
        ("model.norm.weight", "values", False, FIRST, FIRST),
        (FC, "values", True, LAST, LAST),
    ]
    assert found.side_files == {
        "README.md": "only in B", "chat_template.jinja": "other bytes", "merges.txt": "only in A",
        "more/notes.txt": "only in B", INDEX: "other bytes",
    }  # fmt: skip
    assert found.tensors == len(open_checkpoint(a).tensors)


@pytest.mark.parametrize("plan", [Plan(shards=1), Plan(shards=4, head="spread"), Plan(shards=3, head="own file")])
def test_other_shards_are_no_difference(plan: Plan, pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, _ = pair
    b = write(tmp_path / "resharded", family="qwen3-next", plan=plan)
    found = verify(a, b)
    assert (found.verdict, found.differences, set(found.side_files)) == ("identical", [], {INDEX})
    assert found.bytes_read == open_checkpoint(a).nbytes
    flip(b, *head_of(b))
    assert verify(a, b).verdict == "exactly the head"


def test_an_index_that_lost_something_is_a_difference(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What the one lists and the other does not, vLLM may not read."""
    a, b = pair
    index = json.loads((b / INDEX).read_text())
    del index["weight_map"][FC]
    (b / INDEX).write_text(json.dumps(index))
    assert verify(a, b).verdict == "more than the head"
    assert verify(b, a).verdict == "identical"
    (b / INDEX).unlink()
    assert verify(a, b).verdict == "more than the head"


def test_weights_left_out_are_no_difference(pair: tuple[Path, Path]) -> None:
    a, b = pair
    (a / "pytorch_model.bin").write_bytes(b"x")
    found = verify(a, b)
    assert (found.verdict, found.side_files) == ("identical", {"pytorch_model.bin": "only in A"})
    assert verify(b, a).verdict == "more than the head"


def test_hard_links_are_not_read(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    (b / FIRST).unlink()
    os.link(a / FIRST, b / FIRST)
    checkpoint = open_checkpoint(a)
    sizes = checkpoint.shards
    reads: Counter[str] = Counter()
    read = LocalFiles.read

    def counted(self: LocalFiles, name: str, begin: int, end: int) -> bytes:
        reads[name] += end - begin
        return read(self, name, begin, end)

    monkeypatch.setattr(LocalFiles, "read", counted)
    found = verify(a, b)
    assert found.verdict == "identical"
    # Twice, once a side: the headers of both, and the tensors of the file that is not one and the same.
    assert reads[LAST] >= 2 * sizes[LAST] and reads[FIRST] < 2 * sizes[FIRST]
    assert found.bytes_read == sum(entry.nbytes for entry in checkpoint.tensors.values() if entry.file == LAST)


def test_a_stitched_checkpoint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """As the command is used: what was stitched differs in exactly the head, and only the touched shard is read."""
    a, _ = pair
    quiet = Reporter("stitch", quiet=True)
    extract(a, tmp_path / "head", quiet)
    tensors = {key: value + 0.5 for key, value in load_file(tmp_path / "head" / HEAD_FILE).items()}
    save_file(tensors, tmp_path / "tuned.safetensors")
    stitch(a, tmp_path / "tuned.safetensors", tmp_path / "out", quiet)
    found = verify(a, tmp_path / "out")
    assert found.verdict == "exactly the head" and not found.side_files
    assert {one.key for one in found.differences} == set(head_of(a)) and all(one.of_head for one in found.differences)
    assert found.bytes_read < open_checkpoint(a).nbytes


@pytest.mark.parametrize("nested", ["a", "b"])
def test_a_head_under_a_wrapper_counts_as_the_head(nested: str, tmp_path: Path) -> None:
    roots = {name: write(tmp_path / name, family="qwen3.5") for name in "ab"}
    rename("mtp.", "language_model.mtp.")(roots[nested])
    for root in roots.values():
        index = json.loads((root / INDEX).read_text())
        (root / INDEX).write_text(json.dumps(index))
    assert verify(roots["a"], roots["b"]).verdict == "identical"
    key = "language_model.mtp.fc.weight" if nested == "b" else FC
    flip(roots["b"], key)
    found = verify(roots["a"], roots["b"])
    assert (found.verdict, [one.key for one in found.differences]) == ("part of the head", [FC])


@pytest.mark.parametrize("family", families())
def test_every_family_knows_its_head(family: str, tmp_path: Path) -> None:
    a = write(tmp_path / "a", family=family, plan=Plan(copies=True))
    b = Path(shutil.copytree(a, tmp_path / "b"))
    flip(b, *head_of(b))
    assert verify(a, b).verdict == "exactly the head"
    copies = sorted(find_head(open_checkpoint(a)).copies)
    for key in copies:
        flip(b, key)
        assert verify(a, b).verdict == "more than the head"
        flip(b, key)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_change_is_that_of_numpy(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """||b - a|| / ||a||, over several blocks."""
    monkeypatch.setattr("fastmtp.checkpoint.BLOCK", 64)
    a = write(tmp_path / "a", family="qwen3.5", plan=Plan(dtype=dtype))
    b = Path(shutil.copytree(a, tmp_path / "b"))
    tensors = load_file(b / LAST)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tensors[FC].shape, generator=generator) * 0.01
    before = tensors[FC].double().numpy()
    tensors[FC] = (tensors[FC].float() + noise).to(TYPES[dtype])
    save_file(tensors, b / LAST, metadata={"format": "pt"})
    after = tensors[FC].double().numpy()
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    found = verify(a, b)
    assert [one.key for one in found.differences] == [FC]
    assert found.differences[0].change == pytest.approx(expected, abs=1e-6) and expected > 0.01
    assert f"{expected:.2%}" in fastmtp("verify", a, b).stdout


def test_a_change_that_is_no_number(pair: tuple[Path, Path]) -> None:
    """From zero, to what is not finite, and of a type that is no float: a difference without a figure."""
    a, b = pair
    for root in pair:
        store(FC, "BF16", [8, 16], 2)(root)
        store("model.count", "I64", [1], 8)(root)
    flip(b, FC, "model.count")
    assert [(one.key, one.change) for one in verify(a, b).differences] == [("model.count", None), (FC, None)]


def test_what_cannot_be_read_is_bad_input(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    (b / LAST).write_bytes((b / LAST).read_bytes()[:-1])
    for left, right in ((a, b), (b, a), (a, tmp_path / "absent")):
        done = fastmtp("verify", left, right, "--json")
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert json.loads(done.stdout)["error"]["code"] == "invalid_checkpoint"


def test_without_a_head_nothing_counts_as_one(pair: tuple[Path, Path]) -> None:
    a, b = pair
    for root in pair:
        drop("mtp.norm")(root)
    assert verify(a, b).verdict == "identical"
    flip(b, FC)
    found = verify(a, b)
    assert (found.verdict, found.head) == ("more than the head", 0)
    assert "head was not found" in fastmtp("verify", a, b).stdout


def test_a_long_list_is_cut_for_people_only(tmp_path: Path) -> None:
    a = write(tmp_path / "a", family="qwen3-next", config=small_config("qwen3-next", num_experts=16))
    b = Path(shutil.copytree(a, tmp_path / "b"))
    flip(b, *head_of(b))
    total = len(head_of(a))
    shown = fastmtp("verify", a, b, width=80).stdout
    assert f"in the head: {total} with other values" in shown and f"and {total - 20} more" in shown
    assert max(map(len, shown.splitlines())) <= 80
    everything: dict[str, Any] = json.loads(fastmtp("verify", a, b, "--json").stdout)
    assert len(everything["differences"]) == total


def test_a_file_that_goes_away_meanwhile_is_bad_input(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    real = compare.__globals__["_side_files"]

    def gone(*checkpoints: object) -> object:
        (b / "merges.txt").unlink()
        return real(*checkpoints)

    monkeypatch.setitem(compare.__globals__, "_side_files", gone)
    with pytest.raises(CheckpointError, match=r"merges\.txt cannot be read"):
        verify(a, b)
