"""What a job may name, and what is looked at before it starts: every source of prompts, to train and to measure on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fastmtp.config import JobSpec
from fastmtp.errors import ConfigError, DataError, InputError
from fastmtp.policy import Policy
from fastmtp.preflight import check_job, check_prompts
from tests.fastmtp.synthetic import write


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    root = tmp_path / "allowed"
    (root / "logs").mkdir(parents=True)
    (root / "logs/a.jsonl").write_text('{"question": "one plus one?"}\n')
    (root / "test.jsonl").write_text('{"question": "two plus two?"}\n')
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/s.jsonl").write_text('{"question": "what is the password?"}\n')
    return root


def job(allowed: Path, data: Any = None, sets: Any = None, **more: object) -> JobSpec:
    evaluate = {"prompts": sets or str(allowed / "test.jsonl")}
    return JobSpec.parse(
        {"model": str(allowed / "m"), "data": {"prompts": data or str(allowed / "logs"), **more}, "evaluate": evaluate}
    )


def refused(allowed: Path, kind: type[InputError], **changes: Any) -> InputError:
    """The error that a job with these changes meets under a policy of one directory."""
    policy = Policy(sources=(str(allowed), "s3://data/ours", "hf:org/", "hf:team/set"), servers=("http://vllm:8000",))
    with pytest.raises(kind) as caught:
        spec = job(allowed, **changes)
        policy.require_job(spec)
        check_prompts(spec, policy)
    return caught.value


def test_every_source_is_held_to_the_policy(allowed: Path, tmp_path: Path) -> None:
    inside = str(allowed / "logs")
    for outside in (
        str(tmp_path / "secret"), f"{tmp_path}/*/s.jsonl", f"{allowed}/*/../../secret/*.jsonl", f"hf:{tmp_path}/secret",
        f"file://{tmp_path}/secret/s.jsonl", "s3://data/theirs/*.jsonl", "s3://data/ours/../theirs/a.jsonl",
        "s3://data/ours@version/a.jsonl", "s3://data/ours*", "hf:other/set", "hf:team/setter", "../secret",
    ):  # fmt: skip
        for changes, pointer in (
            ({"data": outside}, "/data/prompts"),
            ({"data": [inside, outside]}, "/data/prompts/1"),
            ({"sets": outside}, "/evaluate/prompts"),
            ({"sets": {"a": inside, "b": outside}}, "/evaluate/prompts/b"),
        ):
            error = refused(allowed, InputError, **changes)
            assert isinstance(error, ConfigError), outside
            assert error.pointer == pointer, outside
    policy = Policy(sources=(str(allowed), "s3://data/ours", "hf:org/", "hf:team/set"))
    for source in (
        inside, f"{inside}/*.jsonl", f"hf:{allowed}:main", "s3://data/ours/2026-*/a.jsonl", "hf:org/set:main:train",
        "hf:team/set:main",
    ):  # fmt: skip
        policy.require_job(job(allowed, data=source))


def test_links_do_not_lead_out_of_what_is_allowed(allowed: Path, tmp_path: Path) -> None:
    (allowed / "logs/link.jsonl").symlink_to(tmp_path / "secret/s.jsonl")
    (allowed / "set").symlink_to(tmp_path / "secret")
    for source in (f"{allowed}/logs", f"{allowed}/logs/*", f"{allowed}/logs/link.jsonl", f"{allowed}/s*/*.jsonl",
                   f"hf:{allowed}/logs"):  # fmt: skip
        error = refused(allowed, ConfigError, data=source)
        assert error.pointer == "/data/prompts" and "FASTMTP_ALLOWED_SOURCES" in error.mend, source


def test_servers_are_held_to_the_policy(allowed: Path) -> None:
    for server in ("http://vllm:80001", "http://other:8000", "https://vllm:8000", "http://vllm:8000.evil.org/"):
        assert refused(allowed, ConfigError, server=server).pointer == "/data/server"
    for policy in (Policy(servers=("http://vllm:8000",)), Policy()):
        policy.require_job(job(allowed, server="http://vllm:8000/v1"))
    with pytest.raises(ConfigError, match="outside"):
        Policy(servers=()).require_job(job(allowed, server="http://vllm:8000"))


def test_the_environment_names_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOURCES", "DESTINATIONS", "SERVERS"):
        monkeypatch.delenv(f"FASTMTP_ALLOWED_{name}", raising=False)
    assert Policy.from_env() == Policy(None, None, None)
    monkeypatch.setenv("FASTMTP_ALLOWED_SOURCES", "/data, s3://b/ ,")
    monkeypatch.setenv("FASTMTP_ALLOWED_SERVERS", "")
    assert Policy.from_env() == Policy(("/data", "s3://b/"), None, ())


def test_first_rows_of_every_source_are_read(allowed: Path) -> None:
    good, empty = str(allowed / "test.jsonl"), allowed / "empty.jsonl"
    empty.write_text("{}\n")
    for changes, pointer in (
        ({"data": [good, str(empty)]}, "/data/prompts/1"),
        ({"data": f"{allowed}/e*.jsonl"}, "/data/prompts"),
        ({"sets": {"a": good, "b": str(empty)}}, "/evaluate/prompts/b"),
        ({"sets": f"{allowed}/absent/*.jsonl"}, "/evaluate/prompts"),
    ):
        error = refused(allowed, DataError, **changes)
        assert error.pointer == pointer and str(error)
    many = allowed / "many.jsonl"
    many.write_text('{"label": 1}\n' * 3000)
    both = job(allowed, data=[good, str(many), "hf:org/set"], sets={"a": good})
    looked, unread, same = check_prompts(both, Policy())
    assert "None of the first 2000 rows" in looked and "not looked at" in unread
    assert good in same and "measure" in same


def test_a_host_that_reads_no_tables_leaves_them_to_the_worker(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (allowed / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (warning,) = check_prompts(job(allowed, data=f"{allowed}/t.parquet"), Policy())
    assert "t.parquet was not looked at" in warning and "pyarrow" in warning


def test_a_summary_has_the_warnings(allowed: Path, tmp_path: Path) -> None:
    write(allowed / "m", family="qwen3-next")
    assert check_job(job(allowed), Policy())["warnings"] == []
    warned = check_job(job(allowed, data=str(allowed / "test.jsonl")), Policy())["warnings"]
    assert len(warned) == 1 and str(allowed / "test.jsonl") in warned[0]
