"""Dockerfile, compose files and prefect.yaml, checked without a Docker engine: every name in them means something."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings.models.root import Settings as PrefectSettings

from api.settings import Settings as ApiSettings
from deploy import services
from fastmtp.protocol import WORK_POOL

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# Read by those images, not by us.
THEIRS = {"postgres": re.compile("POSTGRES_"), "s3": re.compile("RCLONE_")}


def source_text() -> str:
    return "\n".join(
        path.read_text() for package in ("fastmtp", "flows", "api") for path in (ROOT / package).rglob("*.py")
    )


def known_prefect_settings() -> set[str]:
    """Every environment variable that Prefect's settings answer to."""
    names: set[str] = set()

    def walk(model: Any) -> None:
        prefix = model.model_config.get("env_prefix", "")
        for name, field in model.model_fields.items():
            names.add(f"{prefix}{name}".upper())
            for choice in getattr(field.validation_alias, "choices", []):
                if isinstance(choice, str):
                    names.add(choice.upper())
            if hasattr(field.annotation, "model_fields"):
                walk(field.annotation)

    walk(PrefectSettings)
    return names


def assert_setting(name: str) -> None:
    """The variable is one that something of ours, Prefect or boto3 reads."""
    if name.startswith("FASTMTP_API_"):
        assert name.removeprefix("FASTMTP_API_").lower() in ApiSettings.model_fields, name
    elif name.startswith("FASTMTP_"):
        assert f'"{name}"' in source_text(), f"nothing reads {name}"
    elif name.startswith("PREFECT_"):
        assert name in known_prefect_settings(), f"Prefect has no setting {name}"
    else:
        assert name.startswith(("AWS_", "PIP_", "PYTHON")) or name == "DO_NOT_TRACK", f"what is {name}?"


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_every_variable_of_a_service_is_a_setting(service):
    for name in SERVICES[service].get("environment", {}):
        if not (service in THEIRS and THEIRS[service].match(name)):
            assert_setting(name)


def test_every_variable_of_the_dockerfile_is_a_setting():
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    pairs = [re.findall(r"([A-Z_0-9]+)=", line) for line in lines if line.startswith("ENV ")]
    names = [name for line in pairs for name in line]
    assert "FASTMTP_VLLM_PYTHON" in names
    for name in names:
        assert_setting(name)


def test_every_variable_of_the_demo_is_a_setting():
    for name in services.PREFECT_ENV:
        assert_setting(name)


def commands() -> list[tuple[str, ...]]:
    """Every command of ours, in compose.yaml and the Dockerfile."""
    ours = [one["command"] for one in SERVICES.values() if str(one.get("image", "")).startswith("fastmtp-")]
    written = [yaml.safe_load(line) for line in re.findall(r"^CMD (.*)$", DOCKERFILE, re.M)]
    return sorted({tuple(command) for command in ours + written})


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_exists_and_takes_its_options(command):
    if command[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(command[2]) is not None
    argv = [sys.executable, "-m", *(command[2:] if command[0] == "python" else command)]
    if command[-1] == "flows.deployments":
        return
    verb = 2 if argv[2] == "api" else 3
    shown = subprocess.run([*argv[: verb + 2], "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    for option in (word for word in command if word.startswith("--")):
        assert option in shown, f"{' '.join(command)} has no {option}"


def test_the_worker_polls_the_pool_that_the_deployments_name():
    command = SERVICES["worker"]["command"]
    assert command[command.index("--pool") + 1] == WORK_POOL


@pytest.mark.parametrize(("service", "port"), [("api", 8000), ("prefect", 4200)])
def test_ports_agree(service, port):
    command = SERVICES[service]["command"]
    assert int(command[command.index("--port") + 1]) == port
    assert SERVICES[service]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"127.0.0.1:{port}/" in SERVICES[service]["healthcheck"]["test"][-1]
    assert str(port) in re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.M)[0].split()


def test_everything_that_is_pointed_at_is_there():
    prefect = SERVICES["api"]["environment"]["PREFECT_API_URL"]
    assert prefect == "http://prefect:4200/api"
    assert ":9000" in SERVICES["s3"]["entrypoint"][-1]
    assert SERVICES["api"]["environment"]["AWS_ENDPOINT_URL_S3"].endswith("http://s3:9000}")
    for one in SERVICES.values():
        for needed in one.get("depends_on", {}):
            assert needed in SERVICES
        for volume in one.get("volumes", []):
            name = volume.split(":")[0]
            assert name in COMPOSE["volumes"] or name.startswith("${MODELS_DIR")


def test_compose_builds_targets_that_the_dockerfile_has():
    stages = set(re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.M))
    for one in SERVICES.values():
        if "build" in one:
            assert one["build"]["target"] in stages
            assert (DEPLOY / one["build"]["context"] / one["build"]["dockerfile"]).is_file()


def test_the_dockerfile_copies_what_exists_and_the_context_holds():
    allowed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for word in line.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), f"{name} is copied and is not there"
        assert name in allowed, f"{name} is copied and not in the build context"


def test_the_dockerfile_installs_extras_that_exist_and_the_api_without_torch():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert len(installed) == 2
    api, worker = (set(found.split(",")) for found in installed)
    assert api | worker <= set(extras)
    assert not any(need.startswith("torch") for extra in api for need in extras[extra])
    assert "train" in worker


def test_the_example_environment_names_what_compose_asks_for():
    text = (DEPLOY / "compose.yaml").read_text()
    asked = set(re.findall(r"\$\{(\w+)", text))
    named = set(re.findall(r"^#?([A-Z_0-9]+)=", (DEPLOY / ".env.example").read_text(), re.M))
    assert asked == named
    required = set(re.findall(r"\$\{(\w+):\?", text))
    empty = set(re.findall(r"^([A-Z_0-9]+)=$", (DEPLOY / ".env.example").read_text(), re.M))
    assert required == empty


def test_no_secret_is_written_down():
    for path in DEPLOY.iterdir():
        if path.is_file() and path.suffix != ".py":
            text = path.read_text()
            given = re.findall(r"\w*(?:PASSWORD|SECRET|AUTH_KEY|KEY_ID|ACCESS_KEY)[=:] *(\S+)", text)
            assert [value for value in given if "${" not in value] == [], path.name
            assert re.findall(r"://[^/@\s]*:[^$@\s]+@", text) == [], path.name


def test_the_gpu_override_changes_the_worker_only():
    override = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    assert set(override["services"]) == {"worker"}


@pytest.mark.prefect
def test_prefect_yaml_deploys_the_same_as_our_own_command(prefect_server):
    """Both ways on a real server, with a schedule in between, which must stay."""
    import asyncio
    from datetime import timedelta

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import IntervalSchedule

    from fastmtp.protocol import FINETUNE_DEPLOYMENT, RETRAIN_DEPLOYMENT
    from flows.deployments import deploy

    async def read() -> dict[str, Any]:
        async with get_client() as client:
            found = {
                name: await client.read_deployment_by_name(name) for name in (FINETUNE_DEPLOYMENT, RETRAIN_DEPLOYMENT)
            }
        return {
            name: (
                one.entrypoint, one.work_pool_name, one.tags, one.job_variables, one.pull_steps or [],
                one.enforce_parameter_schema, one.parameter_openapi_schema,
                one.global_concurrency_limit and (one.global_concurrency_limit.limit, one.concurrency_options),
                [schedule.id for schedule in one.schedules],
            )
            for name, one in found.items()
        }  # fmt: skip

    async def ours() -> dict[str, Any]:
        await deploy()
        async with get_client() as client:
            retrain = await client.read_deployment_by_name(RETRAIN_DEPLOYMENT)
            daily = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(days=1)), active=False)
            await client.create_deployment_schedules(retrain.id, [daily])
        return await read()

    before = asyncio.run(ours())
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "deploy",
        "--all",
        "--prefect-file",
        "deploy/prefect.yaml",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **prefect_server.env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert asyncio.run(read()) == before
