"""`fastmtp inspect`: what it says of good checkpoints, that every fault is found and named, and what it reads."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastmtp import files
from fastmtp.checkpoint import CONFIG, INDEX
from fastmtp.errors import CheckpointError
from fastmtp.families import families, families_table, rows
from fastmtp.families.base import Layout
from fastmtp.inspection import Inspection, inspect
from fastmtp.preflight import Policy, check_model
from tests.fastmtp.faults import CASES, FC, LAST, Case, config, rename
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import VARIANTS, WRAPPED, large_config, small_config

ROOT = Path(__file__).parents[2]


def fastmtp(*arguments: object, width: int = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastmtp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": str(width), "PATH": "/usr/bin"})


@pytest.mark.parametrize(
    ("family", "layout", "wrapped"),
    [(*one, False) for one in VARIANTS] + [(*one, True) for one in VARIANTS if one[0] in WRAPPED],
)
def test_a_good_checkpoint_of_every_family(family: str, layout: Layout, wrapped: bool, tmp_path: Path) -> None:
    root = write(tmp_path, family=family, layout=layout, config=small_config(family, wrapped=wrapped))
    found = inspect(root)
    known = families()[family]
    assert not found.faults and (found.family, found.trainable) == (family, known.trainable)
    assert found.usable is known.trainable
    assert found.sizes == {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16}
    assert found.head and found.head.layout == layout and found.job
    shards = {path.name: path.stat().st_size for path in root.glob("*.safetensors")}
    everything = sum(path.stat().st_size for path in root.iterdir())
    assert (found.files, found.bytes) == (len(shards), sum(shards.values()))
    assert found.head.files == {LAST: found.head.bytes} and found.job.read_by_extract == found.head.bytes
    assert found.job.read_by_train == found.head.bytes + 2 * 16 * 8 * 2
    assert found.job.written_by_stitch_as_copy == everything
    assert found.job.written_by_stitch == everything - (sum(shards.values()) - shards[LAST])
    assert found.job.states_per_1000_tokens == 16_000


@pytest.mark.parametrize("family", families())
def test_the_command(family: str, tmp_path: Path) -> None:
    """As a child process, once for people and once for programs."""
    root = write(tmp_path / "m", family=family, plan=Plan(shards=3, head="spread", copies=True))
    expected = inspect(root)
    done = fastmtp("inspect", root, "--json")
    found = Inspection.model_validate_json(done.stdout)
    assert found.model_copy(update={"seconds": 0.0}) == expected.model_copy(update={"seconds": 0.0})
    assert done.returncode == (0 if expected.usable else 2) and not done.stderr
    shown = fastmtp("inspect", root)
    assert shown.returncode == done.returncode and not shown.stderr
    assert found.head
    for word in (family, found.head.prefix, "whole", *found.head.files, *found.head.copies):
        assert word in shown.stdout
    assert ("a job can use it as it is" in shown.stdout) is found.usable
    assert max(map(len, shown.stdout.splitlines())) <= 100


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.level}")
def test_every_fault_is_found_and_named(case: Case, tmp_path: Path) -> None:
    root = case.make(tmp_path / "m")
    found = inspect(root)
    fault = next((fault for fault in found.faults if (fault.code, fault.level) == (case.code, case.level)), None)
    assert fault, found.faults
    said = f"{fault.what} {fault.mend}"
    assert str(root) in said and all(word in said for word in case.named), said
    assert fault.mend or fault.level == "warning"
    assert not fault.file or fault.file in said
    assert not fault.key or fault.key in said
    blocking = {one.code for one in found.faults if one.level != "warning"}
    assert blocking <= {case.code} | _COMPANIONS.get(case.code, set()), found.faults
    trained = families()[case.family].trainable
    assert found.usable is (case.level == "warning" and trained)
    if not found.usable:
        with pytest.raises(CheckpointError) as caught:
            check_model(str(root), Policy())
        assert case.level == "warning" or fault.what in {one.what for one in caught.value.faults}


# What follows from a fault and may be said besides.
_COMPANIONS = {"head_unexpected": {"head_incomplete"}}


@pytest.mark.parametrize("level", ["error", "serving", "warning"])
def test_faults_in_the_command(level: str, tmp_path: Path) -> None:
    """Exit status, text and JSON for one fault of each level."""
    case = next(case for case in CASES if case.level == level and case.family == "qwen3-next")
    root = case.make(tmp_path / "m")
    shown, done = fastmtp("inspect", root, width=400), fastmtp("inspect", root, "--json")
    assert shown.returncode == done.returncode == (0 if level == "warning" else 2)
    assert not shown.stderr and not done.stderr
    fault = next(one for one in json.loads(done.stdout)["faults"] if one["code"] == case.code)
    label = {"serving": "not served"}.get(level, level)
    assert f"{label}: {fault['what']} {fault['mend']}".strip() in shown.stdout


def test_every_code_in_the_source_is_tested() -> None:
    codes = {code for path in (ROOT / "fastmtp").rglob("*.py") for code in _codes(ast.parse(path.read_text("utf-8")))}
    # The norms' convention is read from their values: test_native.py.
    assert codes == {case.code for case in CASES} | {"norm_convention"}


def _codes(module: ast.Module) -> Iterator[str]:
    """Codes that the calls of `Fault` in a module can give: its second argument, or what that name was set to."""
    nodes = list(ast.walk(module))
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    for call in nodes:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Fault":
            code = call.args[1]
            if isinstance(code, ast.Name):
                name = code.id
                code = next(one.value for one in assigned if any(_is(target, name) for target in one.targets))
            values = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
            yield from (str(ast.literal_eval(value)) for value in values)


def _is(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def test_nothing_there_and_no_checkpoint(tmp_path: Path) -> None:
    done = fastmtp("inspect", tmp_path / "absent", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["pointer"] == "/model"
    assert done.stderr.count("\n") == 1 and "does not exist" in done.stderr
    found = inspect(tmp_path)
    assert {fault.code for fault in found.faults} == {"config_missing", "no_safetensors"}


def test_weights_in_pickles_are_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(small_config("mimo")))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    fault = next(fault for fault in inspect(tmp_path).faults if fault.code == "no_safetensors")
    assert "pytorch_model.bin" in fault.mend


def test_a_large_checkpoint_is_read_by_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """163 GB, sparse on disk: what is read is config, index and headers, to the byte."""
    config = large_config(layers=48, num_experts=512, vocab_size=151936)
    root = write(tmp_path, family="qwen3-next", config=config, plan=Plan(shards=41), sparse=True)
    reads: Counter[str] = Counter()
    read = files.LocalFiles.read

    def counted(self: files.LocalFiles, name: str, begin: int, end: int) -> bytes:
        reads[name] += end - begin
        return read(self, name, begin, end)

    monkeypatch.setattr(files.LocalFiles, "read", counted)
    found = inspect(root)
    assert found.usable and found.bytes > 160e9 and not found.faults
    headers = {path.name: _header_bytes(path) for path in root.glob("*.safetensors")}
    small = {name: (root / name).stat().st_size for name in (CONFIG, INDEX)}
    assert reads == headers | small
    assert sum(reads.values()) < 20e6


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_thousands_of_faults_are_few_lines(tmp_path: Path) -> None:
    """An index of another sharding is one fault a file, not one a tensor."""
    root = write(tmp_path, family="qwen3-next", config=small_config("qwen3-next", num_experts=64))
    index = json.loads((root / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {key: names[name == names[0]] for key, name in index["weight_map"].items()}
    (root / INDEX).write_text(json.dumps(index))
    found = inspect(root)
    assert len(index["weight_map"]) > 400
    assert [fault.code for fault in found.faults] == ["key_misplaced", "key_misplaced"]
    assert all(re.search(r" and \d+ more in ", fault.what) for fault in found.faults)


ODD: list[Any] = [None, True, -1, 0, 1.5, "8", [], {}, 10**9, "\ud800"]


@pytest.mark.parametrize("family", families())
def test_any_field_of_any_type_is_a_fault_or_none(family: str, tmp_path: Path) -> None:
    """No value of config.json, however odd, is anything but a fault."""
    root = write(tmp_path, family=family)
    good = json.loads((root / CONFIG).read_text())
    names = [*good, "quantization_config", "text_config"]
    for name in names:
        for value in ODD:
            (root / CONFIG).write_text(json.dumps(good | {name: value}))
            found = inspect(root)
            found.model_dump_json()
            assert found.usable or found.faults or not found.trainable, (name, value)


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "null", "\ufeff{}", "{" * 100_000, '{"weight_map": 3}', '{"metadata": 3}', "[" * 100_000, "\0"],
)
@pytest.mark.parametrize("name", [CONFIG, INDEX])
def test_any_json_is_a_fault(name: str, content: str, tmp_path: Path) -> None:
    root = write(tmp_path, family="qwen3.5")
    (root / name).write_text(content)
    found = inspect(root)
    assert not found.usable and any(fault.level == "error" for fault in found.faults)


@pytest.mark.parametrize("value", [1, None, [], {}, True, "", "..", "/etc/passwd", "a/b", "\ud800", "x" * 5000])
def test_any_file_name_in_the_index_is_a_fault(value: object, tmp_path: Path) -> None:
    root = write(tmp_path, family="qwen3.5")
    index = json.loads((root / INDEX).read_text())
    index["weight_map"][FC] = value
    (root / INDEX).write_text(json.dumps(index))
    found = inspect(root)
    assert not found.usable and found.faults[0].level == "error"
    found.model_dump_json()


@pytest.mark.parametrize(
    "entry",
    [
        None, 3, "x", [], {}, {"dtype": "BF16", "shape": [8, 16]},
        {"dtype": "BF16", "shape": 8, "data_offsets": [0, 256]},
        {"dtype": "BF16", "shape": [8, "16"], "data_offsets": [0, 256]},
        {"dtype": "BF16", "shape": ["8"], "data_offsets": [0, 256]},
        {"dtype": "BF16", "shape": [[8, 16]], "data_offsets": [0, 256]},
        {"dtype": "BF17", "shape": [8, 16], "data_offsets": [0, 256]},
        {"dtype": ["BF16"], "shape": [8, 16], "data_offsets": [0, 256]},
        {"dtype": "BF16", "shape": [8, 16], "data_offsets": [-256, 0]},
        {"dtype": "BF16", "shape": [8, 16], "data_offsets": [256, 0]},
        {"dtype": "BF16", "shape": [8, 16], "data_offsets": ["0", "256"]},
        {"dtype": "BF16", "shape": [8, 16], "data_offsets": [0, 256, 512]},
        {"dtype": "BF16", "shape": [8, 16], "data_offsets": [0, float("nan")]},
        {"dtype": "BF16", "shape": [8, float("inf")], "data_offsets": [0, 256]},
        {"dtype": "BF16", "shape": [-8, -16], "data_offsets": [0, 256]},
        {"dtype": "BF16", "shape": [10**400, 10**400], "data_offsets": [0, 10**800]},
        {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]},
    ],
)  # fmt: skip
def test_any_entry_of_a_header_is_a_fault(entry: object, tmp_path: Path) -> None:
    root = write(tmp_path, family="qwen3.5")
    _with_header(root / LAST, {FC: entry})
    found = inspect(root)
    assert [(fault.code, fault.file) for fault in found.faults if fault.level == "error"] == [("file_broken", LAST)]
    found.model_dump_json()


@pytest.mark.parametrize("key", ["\ud800", "\x1b[2J", "a\nb", "\0"])
def test_a_name_that_no_terminal_shows_is_a_fault(key: str, tmp_path: Path) -> None:
    root = write(tmp_path, family="qwen3.5")
    _with_header(root / LAST, {key: {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}})
    (root / "\x1b[2Jodd\udcff.safetensors").write_bytes(b"")
    done = fastmtp("inspect", root)
    assert done.returncode == 2 and not done.stderr
    assert "\x1b" not in done.stdout and "broken header" in done.stdout
    assert json.loads(fastmtp("inspect", root, "--json").stdout)["faults"]


def _with_header(path: Path, changes: dict[str, object]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + length]) | changes).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def test_families_for_people_programs_and_the_readme() -> None:
    assert json.loads(fastmtp("families", "--json").stdout)["families"] == rows()
    assert fastmtp("families", "--markdown").stdout.strip() == families_table()
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"<!-- families -->\n{families_table()}\n<!-- /families -->" in readme, "make format writes it"
    shown = fastmtp("families", width=80).stdout
    assert max(map(len, shown.splitlines())) <= 80
    for family in families().values():
        assert family.title in shown and all(name in shown for name in family.model_types)


def test_a_head_kept_under_its_wrapper_says_how_to_mend_it(tmp_path: Path) -> None:
    root = write(tmp_path, family="qwen3.5")
    rename("mtp.", "language_model.mtp.")(root)
    config(quantization_config={"quant_method": "awq", "modules_to_not_convert": ["mtp"]})(root)
    found = inspect(root)
    assert [(fault.level, fault.code) for fault in found.faults] == [("serving", "head_nested")]
    assert "--mend" in found.faults[0].mend and found.quantisation == "awq"
    assert found.head and found.head.prefix == "language_model.mtp."


@pytest.mark.parametrize("layout", ["split", "fused"])
@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_no_alarm_on_what_transformers_saves(family: str, layout: Layout, tmp_path: Path) -> None:
    from tests.fastmtp.fixtures import write_checkpoint

    found = inspect(write_checkpoint(tmp_path / "m", family, layout))
    assert found.usable and not found.faults
