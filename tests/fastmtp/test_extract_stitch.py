"""Extract and stitch: bytes in, bytes out, and nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fastmtp import copying
from fastmtp.checkpoint import INDEX, open_checkpoint
from fastmtp.compare import compare
from fastmtp.errors import CheckpointError, InputError, IntegrityError
from fastmtp.extract import HEAD_FILE, extract
from fastmtp.families.base import Layout
from fastmtp.head import from_native
from fastmtp.inspection import inspect
from fastmtp.progress import Reporter
from fastmtp.stage import MANIFEST, Manifest, read_manifest, sha256_file, write_atomic
from fastmtp.stitch import stitch
from tests.fastmtp.fixtures import MODEL_TYPES, write_checkpoint
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import VARIANTS, small_config

QUIET = Reporter("stitch", quiet=True)


def run_extract(model: Path, target: Path) -> Path:
    extract(model, target, Reporter("extract", quiet=True))
    return target


def run_stitch(model: Path, head: Path, target: Path, **options: object) -> Manifest:
    return stitch(model, head, target, QUIET, **options)  # type: ignore[arg-type]


def perturb(head: Path, change: dict[str, torch.Tensor] | None = None) -> None:
    """Change the head's tensors as training would, and its manifest with them."""
    tensors = change if change is not None else {k: v + 0.5 for k, v in load_file(head / HEAD_FILE).items()}
    save_file(tensors, head / HEAD_FILE, metadata={"format": "pt"})
    manifest = read_manifest(head)
    manifest.files[HEAD_FILE].sha256 = sha256_file(head / HEAD_FILE)
    manifest.files[HEAD_FILE].size = (head / HEAD_FILE).stat().st_size
    write_atomic(head / MANIFEST, manifest.model_dump_json().encode())


def files_of(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}


FIXTURES = [(family, layout, False) for family in MODEL_TYPES for layout in ("split", "fused")]
FIXTURES += [("qwen3.5", "split", True), ("qwen3.5-moe", "split", True), ("qwen3.5-moe", "fused", True)]


@pytest.mark.parametrize(("family", "layout", "wrapped"), FIXTURES)
def test_bytes_come_back_and_transformers_loads_the_result(
    family: str, layout: Layout, wrapped: bool, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "m", family, layout, wrapped=wrapped)
    before = files_of(model)
    head = run_extract(model, tmp_path / "head")
    native = {key: value for shard in model.glob("*.safetensors") for key, value in load_file(shard).items()}
    taken = load_file(head / HEAD_FILE)
    assert taken.keys() == {key for key in native if key.startswith("mtp.")}
    assert taken and all(torch.equal(value, native[key]) for key, value in taken.items())
    same = run_stitch(model, head, tmp_path / "same")
    assert files_of(tmp_path / "same") == before
    assert same.summary["tensors_changed"] == 0
    perturb(head)
    run_stitch(model, head, tmp_path / "out")
    assert files_of(model) == before
    found = compare(model, tmp_path / "out", QUIET)
    assert (found.verdict, found.head) == ("exactly the head", len(taken))
    assert inspect(tmp_path / "out").usable
    loader = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    _, info = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize(("family", "layout"), VARIANTS)
def test_every_family_goes_through(family: str, layout: Layout, tmp_path: Path) -> None:
    """Those that are not fine-tuned too; copies of embedding and output head inside the head stay (Case E5)."""
    model = write(tmp_path / "m", family=family, layout=layout, plan=Plan(head="spread", copies=True))
    head = run_extract(model, tmp_path / "head")
    run_stitch(model, head, tmp_path / "same")
    assert files_of(tmp_path / "same") == files_of(model)
    perturb(head)
    run_stitch(model, head, tmp_path / "out")
    found = compare(model, tmp_path / "out", QUIET)
    assert found.verdict == "exactly the head"
    assert not any("embed_tokens" in difference.key for difference in found.differences)


@pytest.mark.parametrize("mode", ["hardlink", "copy", "auto"])
def test_unchanged_shards_by_mode(mode: str, tmp_path: Path) -> None:
    model = write(tmp_path / "m", family="qwen3-next", plan=Plan(shards=3))
    head = run_extract(model, tmp_path / "head")
    perturb(head)
    manifest = run_stitch(model, head, tmp_path / "out", mode=mode)
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    same = {name for name in shards if (tmp_path / "out" / name).samefile(model / name)}
    assert same == (set() if mode == "copy" else set(shards[:2])) == set(manifest.summary["links"])
    assert manifest.summary["streamed"] == shards[2:]
    for name, entry in manifest.files.items():
        assert (entry.sha256 is None) == (name in same)
        assert entry.matches(tmp_path / "out" / name)
    written = sum(path.stat().st_size for path in model.iterdir() if path.name not in same)
    assert manifest.summary["bytes_written"] == written
    assert compare(model, tmp_path / "out", QUIET).verdict == "exactly the head"


def test_reflinks_come_first_and_links_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of the tests may know no reflinks: the kernel's answer is put in its place."""
    model = write(tmp_path / "m", family="qwen3.5", plan=Plan(shards=2))
    head = run_extract(model, tmp_path / "head")
    answers: dict[str, int | None] = {"reflink": None, "hardlink": None}

    def pretend(source: Path, target: Path, how: str) -> None:
        if (error := answers[how]) is not None:
            raise OSError(error, os.strerror(error))
        shutil.copyfile(source, target)

    monkeypatch.setattr(copying, "_link", pretend)
    links = run_stitch(model, head, tmp_path / "reflink").summary["links"]
    assert set(links.values()) == {"reflink"}
    assert files_of(tmp_path / "reflink") == files_of(model)
    answers |= {"reflink": copying.errno.EOPNOTSUPP, "hardlink": copying.errno.EXDEV}
    assert run_stitch(model, head, tmp_path / "copy").summary["links"] == {}
    assert files_of(tmp_path / "copy") == files_of(model)
    with pytest.raises(InputError, match="reflink is not possible.*--mode copy"):
        run_stitch(model, head, tmp_path / "forced", mode="reflink")
    assert not (tmp_path / "forced").exists()


@pytest.mark.parametrize("links", ["symbolic", "hard"])
def test_links_become_real_files_and_the_source_stays(links: str, tmp_path: Path) -> None:
    """Cases S3, S6: a hub snapshot is all symbolic links; writing through one would change the cache."""
    blobs = write(tmp_path / "blobs", family="qwen3-next")
    (blobs / "sub").mkdir()
    (blobs / "sub" / "notes.txt").write_text("kept")
    (blobs / "pytorch_model.bin").write_bytes(b"weights that may run code")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(path) if links == "symbolic" else (snapshot / path.name).hardlink_to(path)
    shutil.copytree(blobs / "sub", snapshot / "sub")
    before = files_of(blobs)
    head = run_extract(snapshot, tmp_path / "head")
    perturb(head)
    manifest = run_stitch(snapshot, head, tmp_path / "out")
    made = files_of(tmp_path / "out")
    assert files_of(blobs) == before
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert made.keys() == before.keys() - {"pytorch_model.bin"}
    assert manifest.summary["left_out"] == ["pytorch_model.bin"]
    assert {name for name in made if (tmp_path / "out" / name).samefile(blobs / name)} == set(manifest.summary["links"])
    # A second stitch over the first replaces names; it never writes through the links it finds there.
    perturb(head)
    run_stitch(snapshot, head, tmp_path / "out", replace=True)
    assert files_of(blobs) == before


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Case S1: too few, too many, another shape, no float; nothing appears under the final name."""
    model = write_checkpoint(tmp_path / "m")
    good = load_file(run_extract(model, tmp_path / "good") / HEAD_FILE)
    name = "mtp.fc.weight"
    cases = {
        "lacks mtp.fc.weight": {key: value for key, value in good.items() if key != name},
        "has besides mtp.extra": good | {"mtp.extra.weight": good[name].clone()},
        r"\[16, 31\]": good | {name: good[name][:, :-1].contiguous()},
        "I32": good | {name: good[name].int()},
    }
    for number, (match, tensors) in enumerate(cases.items()):
        head = run_extract(model, tmp_path / f"head{number}")
        perturb(head, tensors)
        with pytest.raises(CheckpointError, match=match):
            run_stitch(model, head, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(("stored", "wanted"), [("BF16", "F32"), ("F16", "F32"), ("F32", "BF16"), ("BF16", "F16")])
def test_a_head_of_another_float_type_is_converted(stored: str, wanted: str, tmp_path: Path) -> None:
    """Case S4: fp32 weights go into a bf16 checkpoint as bf16, rounded as torch rounds."""
    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    model = write(tmp_path / "m", family="qwen3.5-moe", plan=Plan(dtype=stored))
    run_extract(model, tmp_path / "head")
    values = {key: torch.randn(value.shape) for key, value in load_file(tmp_path / "head" / HEAD_FILE).items()}
    save_file({key: value.to(types[wanted]) for key, value in values.items()}, tmp_path / "tuned.safetensors")
    run_stitch(model, tmp_path / "tuned.safetensors", tmp_path / "out")
    made = {key: value for shard in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(shard).items()}
    assert all(torch.equal(made[key], value.to(types[wanted]).to(types[stored])) for key, value in values.items())
    assert compare(model, tmp_path / "out", QUIET).verdict == "exactly the head"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == open_checkpoint(tmp_path / "out").nbytes


def test_a_value_that_the_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "m", family="qwen3.5", plan=Plan(dtype="F16"))
    head = run_extract(model, tmp_path / "head")
    good = load_file(head / HEAD_FILE)
    for value in (1e6, float("nan")):
        perturb(head, good | {"mtp.fc.weight": torch.full_like(good["mtp.fc.weight"], value, dtype=torch.float32)})
        with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight holds a value that F16"):
            run_stitch(model, head, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(("kept", "given"), [("split", "fused"), ("fused", "split")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_kept_in_the_layout_found(kept: Layout, given: Layout, dtype: torch.dtype, tmp_path: Path) -> None:
    """Case E2: a head whose experts are stored the other way goes in as the checkpoint stores its own."""
    model = write(tmp_path / "m", family="qwen3-next", layout=kept)
    run_extract(write(tmp_path / "other", family="qwen3-next", layout=given, seed=3), tmp_path / "head")
    head = {key: value.to(dtype) for key, value in load_file(tmp_path / "head" / HEAD_FILE).items()}
    save_file(head, tmp_path / "tuned.safetensors")
    run_stitch(model, tmp_path / "tuned.safetensors", tmp_path / "out")
    assert compare(model, tmp_path / "out", QUIET).verdict == "exactly the head"
    made = load_file(run_extract(tmp_path / "out", tmp_path / "again") / HEAD_FILE)
    config = small_config("qwen3-next")
    ours, theirs = from_native(made, config), from_native(head, config)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key].to(value.dtype)) for key, value in ours.items())


def test_mended_checkpoints_are_loadable(tmp_path: Path) -> None:
    """Cases E1, E4: on request an index lists every tensor, and a wrapper's prefix is taken off the head's names."""
    hidden = write(tmp_path / "hidden", family="qwen3.5", plan=Plan(head="own file", index="without the head"))
    nested = write(tmp_path / "nested", family="qwen3.5-moe", plan=Plan(shards=3, head="spread", index="absent"))
    for shard in nested.glob("*.safetensors"):
        tensors = load_file(shard)
        renamed = {("model.language_model." + key if key.startswith("mtp.") else key): tensors[key] for key in tensors}
        save_file(renamed, shard, metadata={"format": "pt", "by": "some tool"})
    for name, model in {"hidden": hidden, "nested": nested}.items():
        assert not inspect(model).usable
        head = run_extract(model, tmp_path / f"{name}-head")
        run_stitch(model, head, tmp_path / f"{name}-same")
        assert files_of(tmp_path / f"{name}-same") == files_of(model), "kept as found unless asked"
        manifest = run_stitch(model, head, tmp_path / f"{name}-mended", mend=True)
        assert manifest.summary["mended"][0] == INDEX
        found = inspect(tmp_path / f"{name}-mended")
        assert found.usable and found.head and found.head.prefix == "mtp.", found.faults
        assert not found.faults
        assert compare(model, tmp_path / f"{name}-mended", QUIET).differences == []
    header = (tmp_path / "nested-mended" / "model-00001-of-00003.safetensors").read_bytes()[:5000]
    assert b"some tool" in header and b"language_model.mtp" not in header


def test_output_inside_the_source_is_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "m", family="mimo")
    head = run_extract(model, tmp_path / "head")
    (tmp_path / "link").symlink_to(model)
    for target in (model / "out", model, tmp_path / "link" / "out", tmp_path):
        with pytest.raises(InputError, match="lie in each other"):
            run_stitch(model, head, target)


def test_a_directory_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Case S6: unrelated shards of an earlier run never stay behind in a result."""
    model = write(tmp_path / "m", family="mimo")
    head = run_extract(model, tmp_path / "head")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00009-of-00009.safetensors").write_bytes(b"old")
    with pytest.raises(InputError, match="already holds something else"):
        run_stitch(model, head, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model-00009-of-00009.safetensors"]


@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_room_is_asked_for_first(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case S6: a copy needs the whole checkpoint, links only the touched shard and the side files."""
    model = write(tmp_path / "m", family="qwen3-next", plan=Plan(shards=4, head="own file"))
    head = run_extract(model, tmp_path / "head")
    side = sum(path.stat().st_size for path in model.iterdir() if path.suffix != ".safetensors")
    shards = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    needed = side + (shards if mode == "copy" else (model / "mtp.safetensors").stat().st_size)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(needed, 1, needed - 1))
    with pytest.raises(InputError, match="free, the stitched checkpoint needs"):
        run_stitch(model, head, tmp_path / "out", mode=mode)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(needed, 0, needed))
    run_stitch(model, head, tmp_path / "out", mode=mode)


def _grow(model: Path) -> None:
    with (model / "tokenizer.json").open("ab") as file:
        file.write(b"\n")


def _touch(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[-1]
    os.utime(shard, ns=(0, 0))


@pytest.mark.parametrize("change", [_grow, _touch])
def test_a_source_that_changes_meanwhile_is_noticed(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "m", family="qwen3.5")
    head = run_extract(model, tmp_path / "head")
    original = copying.assemble
    begun: list[Path] = []

    def interfering(*args: object) -> object:
        if not begun:
            begun.append(model)
            change(model)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("fastmtp.stitch.assemble", interfering)
    with pytest.raises(IntegrityError, match="changed while|ends .* early"):
        run_stitch(model, head, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bytes_that_change_on_the_way_to_the_disk_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "m", family="qwen3.5")
    head = run_extract(model, tmp_path / "head")

    def corrupting(path: Path, *rest: object) -> object:
        if path.suffix == ".safetensors":
            with path.open("r+b") as file:
                file.seek(20)
                file.write(b"\0")
        return original(path, *rest)  # type: ignore[arg-type]

    original = copying._compare
    monkeypatch.setattr(copying, "_compare", corrupting)
    with pytest.raises(IntegrityError, match="does not hold what was written"):
        run_stitch(model, head, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_memory_stays_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read is larger than a block, whatever the size of a shard or tensor."""
    model = write(tmp_path / "m", family="qwen3.5", plan=Plan(shards=1))
    head = run_extract(model, tmp_path / "head")
    perturb(head)
    largest = []
    original = copying._blocks
    monkeypatch.setattr(copying, "BLOCK", 64)
    monkeypatch.setattr(
        copying, "_blocks", lambda piece: (largest.append(len(block)) or block for block in original(piece))
    )
    run_stitch(model, head, tmp_path / "out")
    assert max(largest) == 64 and len(largest) > 100
    assert compare(model, tmp_path / "out", QUIET).verdict == "exactly the head"
