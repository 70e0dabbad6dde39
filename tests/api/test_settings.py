"""Settings from the environment, and what the command says of wrong ones."""

from __future__ import annotations

import pytest

from api.__main__ import main
from api.settings import Settings


def test_nothing_is_allowed_unless_the_operator_says_so(monkeypatch: pytest.MonkeyPatch):
    allowed = ("FASTMTP_ALLOWED_SOURCES", "FASTMTP_ALLOWED_DESTINATIONS", "FASTMTP_ALLOWED_SERVERS")
    for name in (*allowed, "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings()
    assert (settings.allowed_sources, settings.allowed_destinations, settings.allowed_servers) == ((), (), ())


def test_the_names_a_worker_reads_work_here_and_the_own_ones_come_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTMTP_ALLOWED_SOURCES", "/models, s3://data/ ,")
    monkeypatch.setenv("FASTMTP_ALLOWED_DESTINATIONS", "s3://shared")
    monkeypatch.setenv("FASTMTP_API_ALLOWED_DESTINATIONS", "s3://own")
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect:4200/api")
    settings = Settings()
    assert settings.allowed_sources == ("/models", "s3://data/")
    assert settings.allowed_destinations == ("s3://own",)
    assert settings.run_url("abc") == "http://prefect:4200/runs/flow-run/abc"
    monkeypatch.setenv("FASTMTP_API_PREFECT_UI_URL", "https://prefect.example/")
    assert Settings().run_url("abc") == "https://prefect.example/runs/flow-run/abc"


def test_a_wrong_setting_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FASTMTP_API_POLL_SECONDS", "often")
    assert main(["serve"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("settings: poll_seconds: ") and said.count("\n") == 1


def test_a_database_that_is_not_there_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FASTMTP_API_DATABASE_URL", "sqlite+aiosqlite:////nowhere/fastmtp.db")
    assert main(["migrate"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("database: ") and "/nowhere is no directory" in said and said.count("\n") == 1
