"""What is wrong with a checkpoint is found from its headers, and named."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fastmtp.checkpoint import INDEX, open_checkpoint
from fastmtp.config import JobSpec
from fastmtp.errors import CheckpointError, ConfigError, DataError, DestinationError, InputError
from fastmtp.native import find_head
from fastmtp.preflight import Policy, check_job
from tests.fastmtp.fixtures import MODEL_TYPES, write_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "m"))


def drop(model: Path, match: str) -> None:
    """Take tensors out of shards and index, as tools that re-save a model do."""
    index = json.loads((model / INDEX).read_text())
    for shard in set(index["weight_map"].values()):
        kept = {key: value for key, value in load_file(model / shard).items() if match not in key}
        save_file(kept, model / shard, metadata={"format": "pt"})
    index["weight_map"] = {key: shard for key, shard in index["weight_map"].items() if match not in key}
    (model / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_whole_head_is_found(family: str, layout: str, tmp_path: Path) -> None:
    head = find_head(open_checkpoint(write_checkpoint(tmp_path / "m", family, layout)))
    assert head.family.name == family
    assert head.layout == ("dense" if family == "qwen3.5" else layout)
    assert {entry.dtype for entry in head.tensors.values()} == {"BF16"}
    assert head.embedding.key == "model.embed_tokens.weight"


def test_lost_head(model: Path) -> None:
    drop(model, "mtp.")
    with pytest.raises(CheckpointError, match="lost its MTP head"):
        find_head(open_checkpoint(model))


def test_incomplete_head_names_the_tensor(model: Path) -> None:
    drop(model, "mtp.layers.0.mlp.experts.3.down_proj")
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj"):
        find_head(open_checkpoint(model))


def test_undeclared_head(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        find_head(open_checkpoint(model))


def test_head_under_a_wrapper_prefix_is_named(model: Path, tmp_path: Path) -> None:
    """Case E4: vLLM reads only names that begin with mtp., and skips the rest without a word."""
    for shard in model.glob("*.safetensors"):
        renamed = {("language_model." + key if "mtp" in key else key): value for key, value in load_file(shard).items()}
        save_file(renamed, shard, metadata={"format": "pt"})
    (model / INDEX).unlink()
    assert find_head(open_checkpoint(model)).wrapper == "language_model."
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json.* And 1 more"):
        check_job(job(model, tmp_path), Policy())


def test_missing_shard(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(model)


@pytest.mark.parametrize("size", [0, 5, 100, -7])
def test_truncated_shard(model: Path, size: int) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:size])
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(model)


def test_header_that_lies_about_a_size(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length].replace(b'"BF16"', b'"F32" ', 1)
    shard.write_bytes(data[:8] + header + data[8 + length :])
    with pytest.raises(CheckpointError, match="needs"):
        open_checkpoint(model)


def test_index_that_misplaces_a_key(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    key = next(iter(index["weight_map"]))
    others = set(index["weight_map"].values()) - {index["weight_map"][key]}
    index["weight_map"][key] = sorted(others)[0]
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=key):
        open_checkpoint(model)


def test_index_that_points_outside(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = "../evil.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        open_checkpoint(model)


def test_head_outside_the_index_is_found(model: Path) -> None:
    """Case E1: a sidecar that the index does not list."""
    index = json.loads((model / INDEX).read_text())
    head, rest = {}, {}
    for shard in set(index["weight_map"].values()):
        for key, value in load_file(model / shard).items():
            (head if key.startswith("mtp.") else rest)[key] = value
        (model / shard).unlink()
    save_file(rest, model / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    save_file(head, model / "mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] = dict.fromkeys(rest, "model-00001-of-00001.safetensors")
    (model / INDEX).write_text(json.dumps(index))
    found = find_head(open_checkpoint(model))
    assert {entry.file for entry in found.tensors.values()} == {"mtp.safetensors"}


def job(at: Path, tmp_path: Path, **changes: object) -> JobSpec:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "one plus one?", "answer": "two"}\n')
    value: dict[str, object] = {
        "model": str(at),
        "data": {"prompts": str(prompts)},
        "evaluate": {"prompts": str(prompts)},
        "publish": {"uri": f"file://{tmp_path}/published"},
    }
    return JobSpec.parse(value | changes)


def test_a_job_that_is_in_order(model: Path, tmp_path: Path) -> None:
    summary = check_job(job(model, tmp_path), Policy())
    assert (summary["family"], summary["layout"], summary["head_tensors"]) == ("qwen3-next", "split", 29)


def test_every_refusal_points_at_its_field(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"nothing": 1}\n\nnot json\n')
    (tmp_path / "file").write_text("in the way")
    lost = Path(shutil.copytree(model, tmp_path / "lost"))
    drop(lost, "mtp.")
    cases: list[tuple[dict[str, object], type[InputError], str]] = [
        ({"model": str(lost)}, CheckpointError, "/model"),
        ({"model": str(tmp_path / "absent")}, CheckpointError, "/model"),
        ({"data": {"prompts": str(empty)}}, DataError, "/data/prompts"),
        ({"evaluate": {"prompts": str(tmp_path / "absent")}}, DataError, "/evaluate/prompts"),
        ({"publish": {"uri": f"file://{tmp_path}/file/below"}}, DestinationError, "/publish/uri"),
    ]
    for changes, kind, pointer in cases:
        with pytest.raises(kind) as caught:
            check_job(job(model, tmp_path, **changes), Policy())
        assert caught.value.pointer == pointer, changes


def test_policy_holds_against_links_and_dots(model: Path, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to(model)
    inside = Path(shutil.copytree(model, allowed / "m"))
    prompts = allowed / "p.jsonl"
    prompts.write_text('{"question": "one plus one?"}\n')
    files = {"data": {"prompts": str(prompts)}, "evaluate": {"prompts": str(prompts)}, "publish": None}
    policy = Policy(sources=(str(allowed),), destinations=("s3://models/ours",))
    assert check_job(job(inside, tmp_path, **files), policy)
    for outside in (model, allowed / "link", allowed / ".." / "m", Path(f"{allowed}-beside")):
        with pytest.raises(ConfigError) as caught:
            check_job(job(outside, tmp_path, **files), policy)
        assert caught.value.pointer == "/model"
    for uri in ("s3://models/others/", "s3://models/ours-too/", "s3://models/ours/../others/"):
        with pytest.raises(ConfigError):
            check_job(job(inside, tmp_path, **files | {"publish": {"uri": uri}}), policy)
