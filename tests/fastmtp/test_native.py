"""The head as checkpoints in the field keep it: section 1 of the cases, row by row, and what is asked of the rest."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from fastmtp.checkpoint import CONFIG, INDEX, Checkpoint, open_checkpoint, scan
from fastmtp.errors import CheckpointError
from fastmtp.extract import HEAD_FILE, extract
from fastmtp.families import families
from fastmtp.families.base import Layout, text_config
from fastmtp.files import LocalFiles
from fastmtp.inspection import inspect
from fastmtp.native import HeadInfo, examine, find_head
from fastmtp.norms import check_norms, floats
from fastmtp.preflight import Policy, check_model
from fastmtp.progress import Reporter
from fastmtp.stage import read_manifest
from tests.fastmtp.faults import FC, FIRST, LAST, Header, config, drop, index, rename, shard, store
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import VARIANTS, small_config

KEYS_OF_A_DENSE_HEAD = {
    "mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
    *(
        f"mtp.layers.0.{name}.weight"
        for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    ),
}  # fmt: skip


def look(root: Path) -> tuple[Checkpoint, HeadInfo]:
    checkpoint = open_checkpoint(root)
    return checkpoint, find_head(checkpoint)


def taken(root: Path, target: Path) -> bytes:
    extract(root, target, Reporter("extract", quiet=True))
    return (target / HEAD_FILE).read_bytes()


def codes(root: Path) -> set[tuple[str, str]]:
    return {(fault.level, fault.code) for fault in inspect(root).faults}


class TestE1OffIndex:
    """A head in its own file, or in none that the index names."""

    PLANS = {
        "own file, not in the index": Plan(head="own file", index="without the head"),
        "own file of another name, in the index": Plan(head="own file", head_file="extra_weights.safetensors"),
        "in a listed shard, keys not in the index": Plan(index="without the head"),
    }

    @pytest.mark.parametrize("layout", PLANS)
    def test_the_same_fifteen_tensors(self, layout: str, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5", layout="dense", plan=self.PLANS[layout])
        checkpoint, head = look(root)
        assert head.tensors.keys() == KEYS_OF_A_DENSE_HEAD and len(KEYS_OF_A_DENSE_HEAD) == 15
        listed = "in the index" in layout and "not in" not in layout
        assert {key for key in checkpoint.unlisted if key.startswith("mtp.")} == (
            set() if listed else KEYS_OF_A_DENSE_HEAD
        )
        reference = write(tmp_path / "reference", family="qwen3.5", layout="dense")
        assert taken(root, tmp_path / "head") == taken(reference, tmp_path / "other")
        off_index = read_manifest(tmp_path / "head").summary["off_index"]
        assert off_index == sorted(set() if listed else KEYS_OF_A_DENSE_HEAD)

    def test_what_vllm_makes_of_each(self, tmp_path: Path) -> None:
        """It reads every tensor of a file that the index names, and no file that it does not."""
        found = {}
        for number, (name, plan) in enumerate(self.PLANS.items()):
            root = write(tmp_path / str(number), family="qwen3.5", layout="dense", plan=plan)
            found[name] = codes(root)
        assert list(found.values()) == [
            {("serving", "head_unlisted"), ("warning", "file_unlisted")}, set(), {("warning", "head_unlisted")},
        ]  # fmt: skip

    def test_listed_but_absent_is_an_error(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5", plan=Plan(head="own file"))
        kept = json.loads((root / INDEX).read_text())
        drop(FC, "mtp.safetensors")(root)
        (root / INDEX).write_text(json.dumps(kept))
        with pytest.raises(CheckpointError, match=rf"{FC}.*mtp\.safetensors.*not found"):
            open_checkpoint(root)
        (root / "mtp.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"lacks mtp\.safetensors, which the index lists"):
            open_checkpoint(root)


class TestE2Experts:
    """Experts one by one or stacked, as found."""

    @pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5-moe"])
    def test_both_layouts(self, family: str, tmp_path: Path) -> None:
        config = small_config(family, num_experts=2, moe_intermediate_size=4)
        found = {}
        for layout in ("split", "fused"):
            _, found[layout] = look(write(tmp_path / layout, family=family, layout=layout, config=config))
            assert found[layout].layout == layout
        experts = {name: {k: e.shape for k, e in head.tensors.items() if "experts." in k and "shared" not in k}
                   for name, head in found.items()}  # fmt: skip
        prefix = "mtp.layers.0.mlp.experts."
        assert experts["fused"] == {f"{prefix}gate_up_proj": (2, 8, 8), f"{prefix}down_proj": (2, 8, 4)}
        shapes = {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}
        assert experts["split"] == {f"{prefix}{n}.{k}.weight": shape for n in (0, 1) for k, shape in shapes.items()}
        rest = [{key for key in head.tensors if prefix not in key} for head in found.values()]
        assert rest[0] == rest[1]

    def test_experts_0_and_2_are_an_error(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5-moe")
        rename("mtp.layers.0.mlp.experts.1.", "mtp.layers.0.mlp.experts.2.")(root)
        with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj.*Experts found: 2, numbered 0 to 2"):
            find_head(open_checkpoint(root))
        assert {("error", "head_incomplete"), ("error", "head_unexpected")} == codes(root)

    def test_a_mixture_of_layouts_is_an_error(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5-moe")
        store("mtp.layers.0.mlp.experts.gate_up_proj", "BF16", [2, 8, 8], 2)(root)
        assert ("error", "head_unexpected") in codes(root)


class TestE3Norms:
    """Stored as gains or as offsets from 1."""

    @staticmethod
    def fill(root: Path, value: float, dtype: str, *, only: str = "norm.weight") -> Path:
        """Store every norm of the head as `value`."""
        head = find_head(open_checkpoint(root))
        keys = {entry.key for key, entry in head.tensors.items() if key.endswith(only)}
        pack = {
            "F32": struct.pack("<f", value), "F16": struct.pack("<e", value), "BF16": struct.pack("<f", value)[2:],
        }[dtype]  # fmt: skip

        def change(tensors: dict[str, tuple[Header, bytes]]) -> None:
            for key in keys & tensors.keys():
                entry = tensors[key][0]
                tensors[key] = ({"dtype": dtype, "shape": entry["shape"]}, pack * entry["shape"][0])

        shard(LAST, change)(root)
        return root

    @pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
    @pytest.mark.parametrize("family", families())
    def test_the_other_convention_is_warned_of(self, family: str, dtype: str, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family=family)
        offsets = families()[family].norm == "1 + w"
        for value, warned in ((0.03, not offsets), (1.02, offsets), (-0.2, not offsets), (1.4, offsets)):
            found = check_norms(*look(self.fill(root, value, dtype)))
            assert [fault.code for fault in found] == ["norm_convention"] * warned, value
            assert all(str(root) in fault.what and families()[family].title in fault.what for fault in found)

    def test_one_norm_that_was_trained_far_is_no_alarm(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3-next")
        assert not check_norms(*look(self.fill(root, 0.9, "BF16", only="q_norm.weight")))

    def test_it_reaches_the_user(self, tmp_path: Path) -> None:
        root = self.fill(write(tmp_path / "m", family="qwen3.5"), 1.0, "BF16")
        warnings = check_model(str(root), Policy())["warnings"]
        assert len(warnings) == 1 and "weights around 0 (gain = 1 + w)" in warnings[0]
        taken(root, tmp_path / "head")
        assert read_manifest(tmp_path / "head").summary["warnings"] == warnings

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_norms_that_are_no_numbers(self, bad: float, tmp_path: Path) -> None:
        root = self.fill(write(tmp_path / "m", family="qwen3.5"), bad, "BF16")
        assert [fault.code for fault in check_norms(*look(root))] == ["norm_convention"]

    def test_numbers_are_read_right(self) -> None:
        numbers = [0.0, 1.0, -2.5, 0.15625, 65280.0]
        assert floats(struct.pack("<5f", *numbers), "F32").tolist() == numbers
        assert floats(struct.pack("<5e", *numbers), "F16").tolist() == numbers
        assert floats(b"".join(struct.pack("<f", number)[2:] for number in numbers), "BF16").tolist() == numbers


class TestE4Wrapper:
    """The text part of a multimodal checkpoint."""

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
    def test_sizes_and_embeddings_are_found(self, family: str, tied: bool, tmp_path: Path) -> None:
        wrapped = small_config(family, wrapped=True, tied=tied, hidden_size=12, head_dim=4)
        root = write(tmp_path / "m", family=family, config=wrapped)
        _, head = look(root)
        assert head.embedding.key == "model.language_model.embed_tokens.weight" and not head.wrapper
        assert head.output.key == (head.embedding.key if tied else "lm_head.weight")
        assert head.tensors[FC].shape == (12, 24)
        found = inspect(root)
        assert found.usable and found.tied is tied and not found.faults
        assert found.job and found.job.read_by_train == found.job.read_by_extract + (1 if tied else 2) * 16 * 12 * 2

    def test_ties_said_outside_or_inside(self, tmp_path: Path) -> None:
        wrapped = small_config("qwen3.5", wrapped=True, tied=True)
        root = write(tmp_path / "m", family="qwen3.5", config=wrapped)
        for inside, outside, tied in ((None, True, True), (True, False, True), (True, None, True), (None, None, False)):
            text = {k: v for k, v in wrapped["text_config"].items() if k != "tie_word_embeddings"}
            text |= {} if inside is None else {"tie_word_embeddings": inside}
            config(text_config=text, tie_word_embeddings=outside)(root)
            assert (("error", "shared_missing") in codes(root)) is not tied, (inside, outside)

    @pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "model.model."])
    def test_a_nested_head_is_read_but_not_served(self, prefix: str, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5")
        plain = taken(root, tmp_path / "plain")
        rename("mtp.", f"{prefix}mtp.")(root)
        _, head = look(root)
        assert head.wrapper == prefix and head.tensors.keys() == KEYS_OF_A_DENSE_HEAD
        assert codes(root) == {("serving", "head_nested")}
        with pytest.raises(CheckpointError, match=rf"{prefix}mtp\.\*.*--mend"):
            check_model(str(root), Policy())
        assert taken(root, tmp_path / "head") == plain
        assert read_manifest(tmp_path / "head").summary["renamed_from"] == prefix

    def test_exceptions_from_quantisation(self, tmp_path: Path) -> None:
        """A quantised backbone is no matter where the head was spared; who spared it by another name is warned."""
        root = write(tmp_path / "m", family="qwen3.5")
        for exceptions, warned in (
            (["lm_head"], True), (["mtp.fc"], False), (["re:.*mtp.*"], False), (["model.language_model.mtp"], False),
        ):  # fmt: skip
            config(quantization_config={"quant_method": "fp8", "modules_to_not_convert": exceptions})(root)
            assert codes(root) == ({("warning", "head_not_exempt")} if warned else set())
        layered = write(tmp_path / "n", family="glm4-moe")
        for exception in ("model.layers.2", r"re:model\.layers\.2\..*"):
            config(quantization_config={"quant_method": "fp8", "ignore": [exception]})(layered)
            assert not codes(layered)


class TestE5LayerN:
    """Heads without "mtp" in their name."""

    @pytest.mark.parametrize("copies", [False, True])
    @pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe"])
    def test_the_layer_behind_the_last(self, family: str, copies: bool, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family=family, plan=Plan(copies=copies))
        checkpoint, head = look(root)
        assert head.family.name == family and not codes(root)
        assert all(key.startswith("model.layers.2.") for key in head.tensors)
        assert {"model.layers.2.enorm.weight", "model.layers.2.hnorm.weight", "model.layers.2.eh_proj.weight"} <= set(
            head.tensors
        )
        shared = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
        assert set(head.copies) == (shared if copies else set())
        assert (head.embedding.key, head.output.key) == ("model.embed_tokens.weight", "lm_head.weight")
        assert {key for key in checkpoint.tensors if "layers.2." in key} == {*head.tensors, *head.copies}
        summary_keys = json.loads(taken(root, tmp_path / "head")[8:].split(b"}}")[0] + b"}}")
        assert not shared & summary_keys.keys()

    def test_mimo(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="mimo")
        _, head = look(root)
        assert all(key.startswith("model.mtp_layers.0.") for key in head.tensors) and not codes(root)
        assert head.family.concat == ("hidden", "embedding")

    @pytest.mark.parametrize("family", families())
    def test_a_second_layer_is_refused(self, family: str, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family=family)
        second = {"mimo": "model.mtp_layers.1.x", "deepseek-v3": "model.layers.3.x", "glm4-moe": "model.layers.3.x"}
        key = second.get(family, "mtp.layers.1.x")
        store(key, "BF16", [8], 2)(root)
        with pytest.raises(CheckpointError) as caught:
            find_head(open_checkpoint(root))
        said = [fault.what for fault in caught.value.faults if fault.code == "head_several"]
        assert said and key in said[0] and "exactly one" in said[0]

    @pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
    def test_a_copy_of_another_shape_is_an_error(self, name: str, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="deepseek-v3", plan=Plan(copies=True))
        store(f"model.layers.2.{name}.weight", "BF16", [15, 8], 2)(root)
        assert ("error", "head_shape") in codes(root)

    def test_a_lost_layer_is_not_the_one_before(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="deepseek-v3")
        drop("model.layers.2.")(root)
        with pytest.raises(CheckpointError, match=r"lost its MTP head: no tensor is named model\.layers\.2\.\*"):
            find_head(open_checkpoint(root))
        config(num_nextn_predict_layers=None)(root)
        assert codes(root) == {("error", "head_none")}


class TestBackbone:
    """Is the rest whole, as far as names and shapes can tell."""

    @pytest.mark.parametrize(("family", "layout"), VARIANTS)
    def test_no_alarm_without_cause(self, family: str, layout: Layout, tmp_path: Path) -> None:
        """Deeper than the other tests' models: dense layers first, every kind of attention several times."""
        changes: dict[str, object] = {"num_hidden_layers": 8}
        known = small_config(family)
        if "layer_types" in known:
            changes["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 2
        if "first_k_dense_replace" in known:
            changes["first_k_dense_replace"] = 3
        root = write(tmp_path / "m", family=family, layout=layout, config=small_config(family, **changes))
        assert not codes(root)
        # As Qwen3-Next's own config.json is: it has an interval in the place of the list.
        config(layer_types=None)(root)
        assert not codes(root)

    @pytest.mark.parametrize("number", [0, 1, 2, 4, 7])
    def test_a_dropped_layer(self, number: int, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="glm4-moe", config=small_config("glm4-moe", num_hidden_layers=8))
        for name in (FIRST, LAST):
            drop(f"model.layers.{number}.", name)(root)
        with pytest.raises(CheckpointError, match=rf"lacks 1 of 8 layers.*model\.layers\.{number}\.\*"):
            check_model(str(root), Policy())

    @pytest.mark.parametrize("layer_types", [True, False])
    @pytest.mark.parametrize(
        ("family", "lost"),
        [
            ("deepseek-v3", "layers.1.mlp.up_proj.weight"),  # a dense layer among three
            ("deepseek-v3", "layers.5.mlp.experts.1.up_proj.weight"),
            ("glm4-moe", "layers.4.self_attn.k_norm.weight"),
            ("qwen3-next", "layers.0.linear_attn.A_log"),
            ("qwen3-next", "layers.7.self_attn.q_proj.weight"),
            ("qwen3.5", "layers.3.mlp.down_proj.weight"),
            ("mimo", "layers.0.input_layernorm.weight"),
        ],
    )
    def test_a_layer_with_less_than_its_siblings(
        self, family: str, lost: str, layer_types: bool, tmp_path: Path
    ) -> None:
        changes: dict[str, object] = {"num_hidden_layers": 8, "first_k_dense_replace": 3}
        if family.startswith("qwen"):
            changes["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 2
        root = write(tmp_path / "m", family=family, config=small_config(family, **changes))
        if not layer_types:
            config(layer_types=None)(root)
        for name in (FIRST, LAST):
            drop(f"model.{lost}", name)(root)
        assert codes(root) == {("error", "layer_incomplete")}
        fault = inspect(root).faults[0]
        assert fault.key == f"model.{lost}" and fault.key in fault.what

    def test_a_layer_of_another_model(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5")
        store("model.layers.1.post_attention_layernorm.weight", "BF16", [9], 2)(root)
        config(layer_types=["full_attention"] * 2)(root)
        assert codes(root) == {("error", "layer_shape")}

    def test_a_quantised_backbone_may_spare_layers(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5", config=small_config("qwen3.5", layer_types=["full"] * 2))
        quantisation = {"quant_method": "compressed-tensors", "ignore": ["mtp", "lm_head", "model.layers.0"]}
        config(layer_types=["full_attention"] * 2, quantization_config=quantisation)(root)
        rename("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight_packed")(root)
        store("model.layers.1.mlp.up_proj.weight_scale", "BF16", [12, 1], 2)(root)
        assert not codes(root)
        assert inspect(root).quantisation == "compressed-tensors"

    def test_vision_and_other_parts_are_no_matter(self, tmp_path: Path) -> None:
        root = write(tmp_path / "m", family="qwen3.5", config=small_config("qwen3.5", wrapped=True))
        drop("model.visual.", FIRST)(root)
        store("model.audio.layers.9.weight", "BF16", [3], 2)(root)
        assert not codes(root)


def test_examine_and_find_agree(tmp_path: Path) -> None:
    """`find_head` refuses for the first error of `examine`, and carries all of them."""
    root = write(tmp_path / "m", family="qwen3-next")
    drop("mtp.norm")(root)
    drop("lm_head")(root)
    head, faults = examine(scan(LocalFiles(root)))
    errors = [fault for fault in faults if fault.level == "error"]
    assert head is None and [fault.code for fault in errors] == ["head_incomplete", "shared_missing"]
    with pytest.raises(CheckpointError, match="And 1 more: `fastmtp inspect` lists them") as caught:
        find_head(open_checkpoint(root))
    assert caught.value.faults == tuple(errors) and errors[0].what in str(caught.value)


def test_a_consequence_does_not_hide_its_cause(tmp_path: Path) -> None:
    """With a shard gone the head lacks tensors: what is said is that the shard is gone."""
    root = write(tmp_path / "m", family="qwen3-next")
    (root / LAST).unlink()
    assert codes(root) == {("error", "file_missing")}
    broken = Path(shutil.copytree(write(tmp_path / "n", family="qwen3-next"), tmp_path / "o"))
    (broken / LAST).write_bytes(b"")
    assert codes(broken) == {("error", "file_broken")}


def test_text_config_that_is_no_mapping(tmp_path: Path) -> None:
    root = write(tmp_path / "m", family="qwen3.5")
    config(text_config="none")(root)
    assert not codes(root)
    assert text_config(json.loads((root / CONFIG).read_text()))["hidden_size"] == 8


def test_a_partial_index_is_no_error(tmp_path: Path) -> None:
    root = write(tmp_path / "m", family="qwen3.5-moe", plan=Plan(index="partial", head="spread"))
    assert codes(root) == {("warning", "head_unlisted")}
    index(lambda found: found.update(weight_map={}))(root)
    assert codes(root) == {("error", "index_broken")}
