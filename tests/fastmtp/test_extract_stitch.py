"""Extract and stitch: bytes in, bytes out, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastmtp.checkpoint import open_checkpoint
from fastmtp.errors import CheckpointError, InputError
from fastmtp.extract import HEAD_FILE, extract
from fastmtp.progress import Reporter
from fastmtp.stage import MANIFEST, read_manifest, sha256_file, write_atomic
from fastmtp.stitch import stitch
from tests.fastmtp.fixtures import MODEL_TYPES, write_checkpoint


def run_extract(model: Path, target: Path) -> Path:
    extract(model, target, Reporter("extract", quiet=True))
    return target


def run_stitch(model: Path, head: Path, target: Path) -> Path:
    stitch(model, head, target, Reporter("stitch", quiet=True))
    return target


def perturb(head: Path, change: dict[str, torch.Tensor] | None = None) -> None:
    """Change the head's tensors as training would, and its manifest with them."""
    tensors = change if change is not None else {k: v + 0.5 for k, v in load_file(head / HEAD_FILE).items()}
    save_file(tensors, head / HEAD_FILE, metadata={"format": "pt"})
    manifest = read_manifest(head)
    manifest.files[HEAD_FILE].sha256 = sha256_file(head / HEAD_FILE)
    manifest.files[HEAD_FILE].size = (head / HEAD_FILE).stat().st_size
    write_atomic(head / MANIFEST, manifest.model_dump_json().encode())


def files_of(directory: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in directory.iterdir() if path.name != MANIFEST}


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_an_untrained_head_gives_back_every_byte(family: str, layout: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", family, layout)
    head = run_extract(model, tmp_path / "head")
    native = {key: value for shard in model.glob("*.safetensors") for key, value in load_file(shard).items()}
    taken = load_file(head / HEAD_FILE)
    assert taken and all(torch.equal(value, native[key]) for key, value in taken.items())
    assert taken.keys() == {key for key in native if key.startswith("mtp.")}
    assert files_of(run_stitch(model, head, tmp_path / "out")) == files_of(model)


def test_a_changed_head_changes_exactly_the_head(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    before = files_of(model)
    head = run_extract(model, tmp_path / "head")
    perturb(head)
    out = run_stitch(model, head, tmp_path / "out")
    assert files_of(model) == before
    source, made = open_checkpoint(model), open_checkpoint(out)
    different = {key for key in source.tensors if source.read(source.tensors[key]) != made.read(made.tensors[key])}
    assert different == set(source.below("mtp."))
    assert [(e.dtype, e.shape, e.file) for e in source.tensors.values()] == [
        (e.dtype, e.shape, e.file) for e in made.tensors.values()
    ]
    assert AutoModelForCausalLM.from_pretrained(out) is not None


def test_links_become_real_files_and_the_source_stays(tmp_path: Path) -> None:
    """Cases S3, S6: a hub snapshot is all symbolic links; writing through one would change the cache."""
    blobs = write_checkpoint(tmp_path / "blobs")
    (blobs / "chat_template.jinja").write_text("{{ messages }}")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = files_of(blobs)
    head = run_extract(snapshot, tmp_path / "head")
    perturb(head)
    out = run_stitch(snapshot, head, tmp_path / "out")
    manifest = read_manifest(out)
    assert files_of(blobs) == before
    assert not any(path.is_symlink() for path in out.iterdir())
    assert {path.name for path in out.iterdir()} - {MANIFEST} == set(before)
    assert {name for name in before if (out / name).samefile(blobs / name)} == set(manifest.summary["links"])


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Case S1: too few, too many, another shape, no float; nothing appears under the final name."""
    model = write_checkpoint(tmp_path / "m")
    good = load_file(run_extract(model, tmp_path / "good") / HEAD_FILE)
    name = "mtp.fc.weight"
    cases = {
        "lacks": {key: value for key, value in good.items() if key != name},
        "has besides": good | {"mtp.extra.weight": good[name].clone()},
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


def test_output_inside_the_source_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    head = run_extract(model, tmp_path / "head")
    for target in (model / "out", model):
        with pytest.raises(InputError, match="lie in each other"):
            run_stitch(model, head, target)
