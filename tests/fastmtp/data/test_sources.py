"""Where prompts lie: files, globs, folders, compressed or not, tables, dataset directories; here and in real stores."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fastmtp import storage
from fastmtp.data.sources import lines
from fastmtp.data.sources.opening import list_files, open_source
from fastmtp.data.sources.places import glob_pattern
from fastmtp.errors import DataError, IntegrityError
from fastmtp.stores.s3 import S3Store
from tests.conftest import S3Server
from tests.fastmtp.test_storage import make_bucket, use

ROWS = [{"question": f"{number} + {number}?", "answer": str(2 * number)} for number in range(7)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def rows(source: str, since: float | None = None) -> list[object]:
    return [value for _, found in open_source(source, since) for _, value in found]


def table(path: Path, values: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), path, row_group_size=3)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two days of logs, each the whole of ROWS in another form, beside what is none."""
    for name, data in (
        ("logs/2026-11-01/a.jsonl", TEXT),
        ("logs/2026-11-02/b.jsonl.gz", gzip.compress(TEXT)),
        ("logs/2026-11-02/c.json", json.dumps(ROWS, indent=1).encode()),
        ("logs/2026-11-02/_SUCCESS", b""),
        ("logs/2026-11-02/.part.jsonl", b"{"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    table(tmp_path / "logs/2026-11-03/d.parquet", ROWS)
    return tmp_path / "logs"


def test_files_here(folder: Path) -> None:
    for source in (folder / "2026-11-01/a.jsonl", folder / "2026-11-02/c.json", folder / "2026-11-02/*.gz"):
        assert rows(str(source)) == rows(f"file://{source}") == ROWS
    assert rows(str(folder / "2026-11-03/d.parquet")) == ROWS
    assert rows(str(folder)) == rows(str(folder / "**/?.*")) == rows(f"{folder}/2026-11-*/*.*") == 4 * ROWS
    strange = folder / "[1].jsonl"
    strange.write_bytes(TEXT)
    assert rows(str(strange)) == ROWS


@pytest.fixture(params=["rclone", "moto"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket at each of two real endpoints."""
    server: S3Server = request.getfixturevalue("s3_server" if request.param == "rclone" else "moto_server")
    use(server, monkeypatch)
    make_bucket()
    return "s3://models"


def test_objects_of_a_store(store: str, folder: Path, tmp_path: Path) -> None:
    client = storage.s3_client()
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{tmp_path.name}/{path.relative_to(tmp_path).as_posix()}"
            client.put_object(Bucket="models", Key=key, Body=path.read_bytes())
    client.close()
    root = f"{store}/{tmp_path.name}/logs"
    for name in ("2026-11-01/a.jsonl", "2026-11-02/b.jsonl.gz", "2026-11-02/c.json", "2026-11-03/d.parquet"):
        assert rows(f"{root}/{name}") == ROWS
    assert rows(root) == rows(f"{root}/") == rows(f"{root}/2026-11-*/[a-d].*") == rows(f"{root}/**/?.*") == 4 * ROWS
    assert rows(f"{root}/2026-11-0[!23]/*.jsonl") == ROWS
    assert [name for name, _ in open_source(f"{root}/*/a.jsonl")] == [f"{root}/2026-11-01/a.jsonl"]
    for source, reason in (
        (f"{root}/2027-*/*.jsonl", "matches no file"),
        (f"{root}/absent.jsonl", "holds no file"),
        ("s3://there-is-no-such-bucket/a.jsonl", "NoSuchBucket|404|Not Found|holds no file"),
        ("s3:///a.jsonl", "names no bucket"),
    ):
        with pytest.raises(DataError, match=reason):
            rows(source)


def test_a_large_object_is_a_stream(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first rows of a large object take one small request, and all of it takes requests of a few MiB."""
    use(s3_server, monkeypatch)
    make_bucket()
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    count = 12_000
    client = storage.s3_client()
    client.put_object(Bucket="models", Key=f"{tmp_path.name}.jsonl", Body=line * count)
    client.close()
    sizes: list[int] = []
    read = S3Store.read

    def counted(self: S3Store, key: str, begin: int, end: int, *, stamp: str | None = None) -> bytes:
        data = read(self, key, begin, end, stamp=stamp)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(S3Store, "read", counted)
    source = f"s3://models/{tmp_path.name}.jsonl"
    ((_, found),) = open_source(source)
    assert next(found) == (1, {"text": "x" * 1000})
    assert len(sizes) == 1
    sizes.clear()
    assert len(rows(source)) == count
    assert sum(sizes) == len(line) * count and max(sizes) <= 8 << 20


def test_an_object_that_changes_meanwhile_is_not_read_on(
    moto_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(moto_server, monkeypatch)
    make_bucket()
    client = storage.s3_client()
    key = f"{tmp_path.name}.jsonl"
    client.put_object(Bucket="models", Key=key, Body=TEXT * 40_000)
    ((_, found),) = open_source(f"s3://models/{key}")
    next(found)
    client.put_object(Bucket="models", Key=key, Body=TEXT * 40_001)
    client.close()
    with pytest.raises(IntegrityError, match="changed while it was read"):
        list(found)


def test_what_was_last_changed_before_the_window_is_not_opened(folder: Path) -> None:
    old = folder / "2026-11-01/a.jsonl"
    os.utime(old, (1_000_000_000, 1_000_000_000))
    assert rows(str(folder), 1_000_000_000 + 7200) == 3 * ROWS
    # Clocks differ: within the hour it is read.
    assert rows(str(folder), 1_000_000_000 + 1800) == 4 * ROWS


@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        ("mark.jsonl", b"\xef\xbb\xbf" + TEXT, ROWS),
        ("crlf.jsonl", TEXT.replace(b"\n", b"\r\n"), ROWS),
        ("no-end.jsonl", TEXT.rstrip(), ROWS),
        ("mark.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), ROWS),
        ("lists.jsonl", b"".join(json.dumps([row]).encode() + b"\n" for row in ROWS), [[row] for row in ROWS]),
        ("spread.json", b"".join(json.dumps(row, indent=2).encode() + b"\n" for row in ROWS), ROWS),
        ("no-suffix-gz.jsonl", gzip.compress(TEXT) + gzip.compress(TEXT), ROWS + ROWS),
        ("a.txt", b"one\n\n two \n", [{"text": "one"}, "blank line", {"text": "two"}]),
        ("odd.jsonl", b'{"a": 1}\n\n{broken\n"\xff"\n' + b"[" * 5000 + b"\n3", [{"a": 1}, "blank line", "not JSON",
         "not UTF-8", "not JSON", 3]),
        ("empty.jsonl", b"", []),
    ],
)  # fmt: skip
def test_texts(tmp_path: Path, name: str, data: bytes, wanted: list[object]) -> None:
    (tmp_path / name).write_bytes(data)
    assert rows(str(tmp_path / name)) == wanted


def test_an_array_over_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"text": "\u00e9\U0001f600" * number, "n": number} for number in range(60)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2))
    for block in (1 << 20, 64, 7):
        monkeypatch.setattr(lines, "_BLOCK", block)
        assert rows(str(path)) == values
    for cut in (b"[", b'[{"a": 1}', b'[{"a": 1}, {"b', b'[{"a": 1}, nonsense]'):
        path.write_bytes(cut)
        with pytest.raises(DataError, match=r"item \d of the array"):
            rows(str(path))


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST", 100)
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n"' + b"x" * 1000 + b'"\n{"b": 2}\n')
    ((_, found),) = open_source(str(tmp_path / "a.jsonl"))
    assert list(found) == [(1, {"a": 1}), (2, "row too long"), (3, {"b": 2})]


def test_what_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(TEXT * 1000)[:-20])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "none").mkdir()
    for source, reason in (
        (f"{tmp_path}/cut.jsonl.gz", "cut.jsonl.gz cannot be read"),
        (f"{tmp_path}/bad.parquet", "bad.parquet cannot be read as Parquet"),
        (f"{tmp_path}/none", "holds no file to read"),
        (f"{tmp_path}/absent.jsonl", "No such file"),
        (f"{tmp_path}/*.csv", "matches no file"),
        ("gs://bucket/a.jsonl", "unknown kind"),
        ("hf:", "is not hf:DATASET"),
        ("hf:a:b:c:d", "is not hf:DATASET"),
        (f"hf:{tmp_path}/absent", "is no directory"),
        ("a\0b", "null character"),
    ):
        with pytest.raises(DataError, match=reason):
            rows(source)


def test_tables_leave_out_what_a_row_does_not_have(tmp_path: Path) -> None:
    called = {"role": "tool", "content": "b", "tool_call_id": "c"}
    values: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}, called], "note": None},
        {"messages": [{"role": "user", "content": "d"}], "note": "n"},
    ]
    assert rows(str(table(tmp_path / "t.parquet", values))) == [{"messages": values[0]["messages"]}, values[1]]


def test_globs_match_as_the_shell_does() -> None:
    for pattern, yes, no in (
        ("a/*.jsonl", ["a/b.jsonl", "a/.jsonl"], ["a/b/c.jsonl", "xa/b.jsonl", "a/bxjsonl"]),
        ("a/**/*.gz", ["a/b.gz", "a/b/c/d.gz"], ["b/a/c.gz"]),
        ("2026-1?-[!0]*", ["2026-11-1"], ["2026-11-01", "2026-1/-1"]),
        ("a+(b)", ["a+(b)"], ["aab"]),
    ):
        assert all(glob_pattern(pattern).fullmatch(name) for name in yes), pattern
        assert not any(glob_pattern(pattern).fullmatch(name) for name in no), pattern


README = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*.parquet
  - split: test
    path: ["main/test-*.parquet"]
- config_name: socratic
  data_dir: socratic
---
# A dataset
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Laid out as on the hub: two configurations, one of files that are named, one of a folder."""
    root = tmp_path / "dataset"
    table(root / "main/train-00000-of-00002.parquet", ROWS[:3])
    table(root / "main/train-00001-of-00002.parquet", ROWS[3:5])
    table(root / "main/test-00000-of-00001.parquet", ROWS[5:])
    table(root / "socratic/train.parquet", ROWS)
    table(root / "socratic/test.parquet", ROWS[:1])
    (root / "README.md").write_text(README)
    return root


def test_dataset_directories_are_read_as_the_library_reads_them(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    bare = tmp_path / "bare"
    shutil.copytree(dataset / "main", bare / "data")
    lined = tmp_path / "lined"
    lined.mkdir()
    (lined / "train.jsonl").write_bytes(TEXT)
    (lined / "dev.jsonl").write_bytes(TEXT.splitlines(keepends=True)[0])
    for root, config, split in (
        (dataset, None, "train"), (dataset, "main", "test"), (dataset, "socratic", "train"),
        (dataset, "socratic", "test"), (bare, None, "train"), (bare, "default", "test"), (lined, None, "validation"),
    ):  # fmt: skip
        theirs = datasets.load_dataset(str(root), config, split=split, streaming=True)
        assert rows(f"hf:{root}:{config or ''}:{split}") == list(theirs), (root, config, split)
    assert rows(str(dataset)) == rows(f"hf:{dataset}") == rows(str(bare)) == ROWS[:5]
    for source, reason in (
        (f"hf:{dataset}:other", "has no configuration other.*main, socratic"),
        (f"hf:{dataset}:main:dev", "has no split dev.*train, test"),
        (f"hf:{bare}:main", "has no configuration main"),
    ):
        with pytest.raises(DataError, match=reason):
            rows(source)


@pytest.mark.parametrize("path", ["/etc/*", "../secret.jsonl", "https://example.org/a.parquet", "main/../../s.jsonl"])
def test_a_dataset_names_no_file_elsewhere(dataset: Path, path: str) -> None:
    (dataset / "README.md").write_text(README.replace("main/train-*.parquet", path))
    with pytest.raises(DataError, match="not in the directory"):
        rows(str(dataset))


def test_datasets_of_the_hub_are_streamed(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library in the place of the hub: asked for a stream, and for its cache where no hub answers."""
    import datasets

    load, asked = datasets.load_dataset, []

    def loaded(name: str, config: str | None = None, **how: Any) -> Any:
        asked.append((name, config, how))
        if name == "org/offline" and how:
            raise ConnectionError("no hub here")
        if name == "org/absent":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/absent' doesn't exist on the Hub")
        return load(str(dataset), config, streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    assert rows("hf:org/name") == rows("hf:org/name:main") == rows("hf:org/offline:main:train") == ROWS[:5]
    assert rows("hf:org/name:main:test") == ROWS[5:]
    assert asked[0] == ("org/name", None, {"streaming": True}) and asked[3] == ("org/offline", "main", {})
    assert list_files("hf:org/name") is None
    for source, reason in (("hf:org/absent", "doesn't exist"), ("hf:org/name:main:dev", "has no split dev")):
        with pytest.raises(DataError, match=reason):
            rows(source)


@pytest.fixture(autouse=True)
def _quiet_datasets() -> Iterator[None]:
    """The library's progress bars stay out of the tests' output."""
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
