"""What a running job tells the outside: stages, progress records, the final report, and the names they travel under.

The flow emits these and the API reads them; neither imports the other, so the words both must agree on stand here.
Loads no torch, no prefect, no database.

- While a job runs, each progress record goes out as a Prefect event (`EVENT_PROGRESS`) whose resource is
  `resource_id(job_id)`. Events are a courtesy copy: one may be lost.
- When a job ends, its report is stored as a Prefect artifact under `RESULT_KEY`, by a call that returns only when the
  server has it. That is the record.
"""

from __future__ import annotations

import re
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Stage = Literal["preflight", "extract", "prepare", "train", "stitch", "evaluate", "publish"]
STAGES: tuple[Stage, ...] = ("preflight", "extract", "prepare", "train", "stitch", "evaluate", "publish")

EVENT_PROGRESS = "fastmtp.job.progress"
RESULT_KEY = "fastmtp-result"
JOB_TAG_PREFIX = "job:"
SCHEDULE_TAG_PREFIX = "schedule:"
COMMON_TAG = "fastmtp"

FINETUNE_DEPLOYMENT = "finetune/worker"
RETRAIN_DEPLOYMENT = "retrain/scheduled"
WORK_POOL = "fastmtp"

# Percent of a job's time that each stage takes, roughly; they add up to 100. Only for showing progress.
STAGE_SHARES = {"preflight": 1, "extract": 2, "prepare": 25, "train": 35, "stitch": 3, "evaluate": 30, "publish": 4}


def resource_id(job_id: str) -> str:
    """The event resource of a job."""
    return f"fastmtp.job.{job_id}"


def result_key(job_id: str) -> str:
    """Key of the artifact that holds a job's report. Artifact keys may hold only lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{RESULT_KEY}-{job_id}".lower())


def scheduled_job_id(flow_run_id: uuid.UUID | str) -> str:
    """Id of the job that a firing of a schedule is: the flow and the API both work it out from the flow run."""
    return f"ftjob-{uuid.UUID(str(flow_run_id)).hex}"


class Progress(BaseModel):
    """One line of a stage's progress file, and the payload of one event.

    `done` and `total` count in `unit` (rows, steps, bytes, prompts); `fraction` of the whole job is the reader's
    business. `metrics` holds numbers worth a plot: `step`, `loss`, `loss_0..`, `lr`, `tokens_per_second`,
    `acceptance_0..`, `mean_acceptance_length`.
    """

    # JSON has no NaN, and a loss that became one must still reach whoever watches.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    time: float = Field(description="Unix seconds.")
    stage: Stage
    status: Literal["started", "running", "finished", "skipped", "failed"]
    done: float = 0
    total: float | None = None
    unit: str = ""
    message: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)

    def job_fraction(self) -> float:
        """How much of the whole job is behind this record, 0 to 1. May fall back a little where a stage has phases."""
        before = sum(STAGE_SHARES[stage] for stage in STAGES[: STAGES.index(self.stage)])
        if self.status in ("finished", "skipped"):
            share = 1.0
        else:
            share = min(1.0, self.done / self.total) if self.total else 0.0
        return (before + share * STAGE_SHARES[self.stage]) / 100


class Measurement(BaseModel):
    """Acceptance of a head under vLLM: rate_i = accepted at position i / drafts; mean length = 1 + sum of the rates."""

    acceptance: list[float]
    mean_acceptance_length: float
    drafts: int


class Artifact(BaseModel):
    """One published file."""

    uri: str
    size: int
    sha256: str


class Report(BaseModel):
    """`report.json`: how a job ended. `status` is `rejected` when the gate said no and `failed` with `error` set."""

    job_id: str
    status: Literal["succeeded", "rejected", "failed"]
    base: Measurement | None = None
    tuned: Measurement | None = None
    incumbent: Measurement | None = Field(None, description="What was published before, measured the same way.")
    greedy_identical: tuple[int, int] | None = Field(None, description="Same answers, of how many; none unless greedy.")
    gate: dict[str, Any] = Field(default_factory=dict, description="`passed` and `reason`.")
    published: str | None = Field(None, description="URI of the published version.")
    artifacts: list[Artifact] = Field(default_factory=list)
    seconds: dict[str, float] = Field(default_factory=dict, description="Per stage.")
    error: dict[str, str] | None = Field(None, description="`code`, `message` and `stage` of what failed.")
