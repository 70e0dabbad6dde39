"""What a running job tells the outside: stage names, progress records, the final report, and the names they travel under.

The flow emits these and the API reads them; neither imports the other, so the words both must agree on stand here. Loads no
torch, no prefect, no database.

- While a job runs, each progress record goes out as a Prefect event (`EVENT_PROGRESS`) whose resource is
  `resource_id(job_id)`. Events are a courtesy copy: one may be lost.
- When a job ends, its report is stored as a Prefect artifact under `RESULT_KEY`, by a call that returns only when the
  server has it. That is the record.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

STAGES = ("preflight", "extract", "prepare", "train", "stitch", "evaluate", "publish")
Stage = Literal["preflight", "extract", "prepare", "train", "stitch", "evaluate", "publish"]

EVENT_PROGRESS = "fastmtp.job.progress"
RESULT_KEY = "fastmtp-result"
JOB_TAG_PREFIX = "job:"
SCHEDULE_TAG_PREFIX = "schedule:"
COMMON_TAG = "fastmtp"

FINETUNE_DEPLOYMENT = "finetune/worker"
RETRAIN_DEPLOYMENT = "retrain/scheduled"
WORK_POOL = "fastmtp"


def resource_id(job_id: str) -> str:
    """The event resource of a job."""
    return f"fastmtp.job.{job_id}"


class Progress(BaseModel):
    """One line of a stage's progress file, and the payload of one event.

    `done` and `total` count in `unit` (rows, steps, bytes, prompts); `fraction` of the whole job is the reader's business.
    `metrics` holds numbers worth a plot: `step`, `loss`, `loss_0..`, `lr`, `tokens_per_second`, `acceptance_0..`,
    `mean_acceptance_length`.
    """

    model_config = ConfigDict(extra="forbid")

    time: float = Field(description="Unix seconds.")
    stage: Stage
    status: Literal["started", "running", "finished", "skipped", "failed"]
    done: float = 0
    total: float | None = None
    unit: str = ""
    message: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)


class Measurement(BaseModel):
    """Acceptance of one head under vLLM: rate_i = accepted at position i / drafts; mean length = 1 + sum of the rates."""

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
