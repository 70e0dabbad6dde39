"""What travels over the wire: OpenAI's fine-tuning shapes, with what they have no word for added beside them.

Times are unix seconds in these shapes; schedules, which are ours alone, use RFC 3339.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from fastmtp.protocol import Artifact, Measurement

Key = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]
Source = Annotated[str, StringConstraints(min_length=1)]
Status = Literal["queued", "running", "succeeded", "failed", "cancelling", "cancelled"]
ItemT = TypeVar("ItemT")

EXAMPLE_JOB: dict[str, JsonValue] = {
    "model": "/models/qwen3-next",
    "training_file": "s3://data/prompts-train.jsonl",
    "validation_file": "s3://data/prompts-test.jsonl",
    "seed": 0,
    "method": {
        "type": "mtp",
        "mtp": {"train": {"epochs": 3, "lr": 1.0e-4}, "publish": {"uri": "s3://models/qwen3-next-fastmtp/"}},
    },
}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """No file name, and not every database, can hold a NUL or half a surrogate pair."""
        text = json.dumps(value, ensure_ascii=False)
        if "\\u0000" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("must hold text without NUL characters and lone surrogates")
        return value


class MtpMethod(_Request):
    """The parts of a job that OpenAI's shape has no place for. Fields and defaults are those of a job file."""

    data: dict[str, Any] = Field(default_factory=dict, description="As `data` of a job file, without `prompts`.")
    train: dict[str, Any] = Field(default_factory=dict, description="As `train` of a job file.")
    evaluate: dict[str, Any] = Field(default_factory=dict, description="As `evaluate` of a job file.")
    gate: dict[str, Any] = Field(default_factory=dict, description="As `gate` of a job file.")
    publish: dict[str, Any] | None = Field(None, description='`{"uri": "s3://..."}`; nothing is published without.')


class Method(_Request):
    """How to fine-tune."""

    type: Literal["mtp"] = "mtp"
    mtp: MtpMethod = Field(default_factory=MtpMethod)


class JobCreate(_Request):
    """A job to make."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE_JOB]})

    model: str = Field(min_length=1, description="Checkpoint of the verifier, with its own MTP head.")
    training_file: Source | Annotated[list[Source], Field(min_length=1)] = Field(
        description="Prompts to train on: path, glob, s3:// URI or prefix, hf:DATASET:...:SPLIT; or a list of these."
    )
    validation_file: Source | dict[str, Source] | None = Field(
        None, description="Prompts to measure acceptance on; several sets by name."
    )
    method: Method = Field(default_factory=Method)
    seed: int | None = Field(
        None, ge=0, lt=2**31, description="Of data and training; made up, and answered, if absent."
    )
    suffix: str | None = Field(None, min_length=1, max_length=64, description="A label of yours, kept with the job.")
    metadata: dict[Key, Value] | None = Field(None, max_length=16)


class JobError(BaseModel):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class Acceptance(BaseModel):
    """Acceptance per draft position and mean acceptance length, measured by vLLM."""

    base: Measurement | None
    tuned: Measurement | None
    incumbent: Measurement | None = Field(description="What was published before, if something was.")


class StageView(BaseModel):
    """How far a stage is. `done` and `total` count in `unit`."""

    stage: str
    status: str
    seconds: float
    done: float
    total: float | None
    unit: str


class AttemptView(BaseModel):
    """One run of the job in Prefect."""

    number: int
    flow_run_id: str | None
    url: str | None = Field(description="The run in Prefect's UI.")
    state: str | None = Field(description="Prefect's name of the run's state.")
    created_at: int
    finished_at: int | None


class JobView(BaseModel):
    """A job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    started_at: int | None
    finished_at: int | None
    estimated_finish: int | None = None
    model: str
    fine_tuned_model: str | None = Field(description="URI of the published checkpoint.")
    organization_id: str = "fastmtp"
    status: Status
    status_detail: str | None
    stage: str | None
    progress: float = Field(description="Of the whole job, 0 to 1; an estimate.")
    stages: list[StageView]
    training_file: str | list[str]
    validation_file: str | dict[str, str] | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any] = Field(description="As asked for, with every default filled in.")
    seed: int
    suffix: str | None
    metadata: dict[str, str] | None
    trained_tokens: int | None = None
    result_files: list[str]
    integrations: list[Any] = Field(default_factory=list)
    error: JobError | None
    acceptance: Acceptance | None
    greedy_identical: tuple[int, int] | None = Field(description="Answers that stayed the same, of how many.")
    gate: dict[str, Any] | None
    artifacts: list[Artifact]
    attempts: list[AttemptView]
    schedule_id: str | None
    revision: int


class EventView(BaseModel):
    """Something that happened to a job. `data` of a metrics event holds the numbers."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class MetricPoint(BaseModel):
    """The numbers of one moment. A loss that was not finite is the text `nan` or `inf`."""

    id: str
    stage: str
    time: float
    values: dict[str, float | str]


class ScheduleCreate(_Request):
    """A job to make again and again."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"cron": "0 3 * * 1", "timezone": "Europe/Berlin", "job": EXAMPLE_JOB}]}
    )

    cron: str = Field(min_length=1, max_length=255, description="Five fields, such as `0 3 * * 1`.")
    timezone: str = Field("UTC", max_length=64, description="IANA name; the cron follows its local time.")
    job: JobCreate


class ScheduleView(BaseModel):
    """A schedule. `state` is `pending` until Prefect has it, and `failed` with `status_detail` when it refused."""

    id: str
    object: Literal["schedule"] = "schedule"
    created_at: str
    cron: str
    timezone: str
    state: Literal["pending", "active", "failed"]
    status_detail: str | None
    job: dict[str, Any]
    last_job_id: str | None


class Page(BaseModel, Generic[ItemT]):
    """Part of a list, in order. `after=<last_id>` asks for the next part while `has_more`."""

    object: Literal["list"] = "list"
    data: list[ItemT]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ProblemView(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    param: str | None
    errors: list[dict[str, str]] | None = None
