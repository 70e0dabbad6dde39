"""The job schema: one set of pydantic models behind the command line, REST and the flow's parameters.

Loads no torch. `JobSpec.from_yaml` and `to_yaml` are exact inverses; unknown fields are refused, so that a typing error
never silently falls back to a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fastmtp.errors import ConfigError

LossKind = Literal["ce", "kl", "tv"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataConfig(_Strict):
    """Prompts to train on, and how the verifier answers them."""

    prompts: str = Field(description="Path, s3:// or file:// URI of a JSONL file, or hf:DATASET:CONFIG:SPLIT.")
    responses: Literal["self"] = Field("self", description="self: the verifier's own greedy answers.")
    max_samples: int | None = Field(
        None, ge=1, description="Use at most this many prompts (seeded choice); all when unset."
    )
    max_length: int = Field(4096, ge=8, le=1_048_576, description="Longest row, prompt and answer, in tokens.")
    max_new_tokens: int = Field(512, ge=1, description="Longest answer, in tokens.")
    holdout: Fraction = Field(0.05, description="Share of conversations kept out of training for the estimate.")
    batch_size: int = Field(32, ge=1, description="Prompts answered at once.")
    seed: int = Field(0, ge=0, description="Seed of the choice of prompts.")


class TrainConfig(_Strict):
    """How the head is trained. The defaults are FastMTP's, with the recursion vLLM runs."""

    num_steps: int = Field(3, ge=1, le=16, description="Recursive steps K.")
    beta: float = Field(0.6, gt=0.0, le=1.0, description="Step k weighs beta**k, normalised over the steps.")
    recursion: Literal["serving", "plain"] = Field(
        "serving", description="serving: as vLLM decodes. plain: as FastMTP trains."
    )
    loss: LossKind | dict[LossKind, Annotated[float, Field(gt=0.0)]] = Field(
        "ce",
        description="ce: cross-entropy on the verifier's own next tokens. kl, tv: distance to its whole distribution."
        " A mixture: {ce: 0.5, tv: 0.5}.",
    )
    epochs: int = Field(3, ge=1, description="Passes over the training rows.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps, if earlier.")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon for matrices, AdamW for the rest.")
    lr: float = Field(1.0e-4, gt=0.0, lt=1.0, description="Peak learning rate.")
    schedule: Literal["cosine", "linear"] = Field(
        "cosine", description="How the rate falls after the warm-up, to a tenth of its peak."
    )
    warmup_ratio: Fraction = Field(0.05, description="Share of the steps over which the rate rises linearly.")
    weight_decay: float = Field(0.0, ge=0.0, description="Decoupled weight decay on matrices (never on norms).")
    grad_clip: float = Field(1.0, gt=0.0, description="Largest norm of the gradient.")
    batch_tokens: int = Field(16384, ge=8, description="Tokens of an optimizer step, prompt and answer.")
    micro_tokens: int = Field(
        8192, ge=8, description="Tokens run through the head at once, per process; the gradients of a step add up."
    )
    validate_every: int | None = Field(
        None, ge=1, description="Steps between estimates on held-out rows; at each epoch's end there is one anyway."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Compute type; master weights are always fp32."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    seed: int = Field(0, ge=0, description="Seed of the order of rows.")
    allow_untrained_head: bool = Field(
        False, description="Train a head that predicts nothing yet; otherwise it is taken for one that was mis-read."
    )
    processes: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = Field(
        "auto", description="Processes on this host that share each step's rows. auto: one per GPU."
    )
    shard: bool = Field(
        False, description="Spread weights, gradients and optimizer state over the processes (FSDP), to save memory."
    )
    recompute: bool = Field(
        False, description="Compute the feed-forward part again in the backward pass, to save memory."
    )
    save_every: int | None = Field(
        None, ge=1, description="Steps between saves; unset, every ten minutes. One precedes each estimate anyway."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard events too (needs the extra `tensorboard`).")

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        if not self.mixture:
            raise ValueError("a mixture names at least one loss: ce, kl or tv")
        if self.optimizer == "muon" and self.shard:
            raise ValueError("Muon needs whole matrices; with shard: true use optimizer: adamw")
        return self

    @property
    def mixture(self) -> dict[str, float]:
        """Kind of loss -> its weight."""
        return (
            {self.loss: 1.0} if isinstance(self.loss, str) else {str(kind): share for kind, share in self.loss.items()}
        )

    def identity(self) -> dict[str, Any]:
        """What makes a result another one. How work is spread and saved does not: a run may go on with those changed,
        and its results then agree up to the rounding of sums in another order.
        """
        return self.model_dump(exclude={"processes", "shard", "recompute", "save_every", "tensorboard", "micro_tokens"})


class EvaluateConfig(_Strict):
    """How acceptance is measured, by vLLM itself, before and after."""

    prompts: str = Field(description="Prompts the head was not trained on; same forms as data.prompts.")
    num_prompts: int = Field(200, ge=1, description="How many of them, in file order.")
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="Draft tokens per step, K.")
    max_tokens: int = Field(512, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(
        0.0, ge=0.0, le=2.0, description="0 is greedy; answers are then compared token by token."
    )
    concurrency: int = Field(64, ge=1, description="Requests in flight at once.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("bfloat16", description="vLLM's --dtype.")
    server_args: tuple[str, ...] = Field(
        (), description="More arguments for vLLM's server, such as --tensor-parallel-size 8."
    )

    @field_validator("server_args")
    @classmethod
    def _no_remote_code(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Only flags that size the server are let through: a job must not widen what the operator allows."""
        allowed = (
            "--tensor-parallel-size",
            "--pipeline-parallel-size",
            "--gpu-memory-utilization",
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--enable-expert-parallel",
            "--max-model-len",
            "--kv-cache-dtype",
            "--swap-space",
        )
        for word in value:
            if word.startswith("-") and word.split("=", 1)[0] not in allowed:
                raise ValueError(f"server argument {word} is not allowed; allowed are {', '.join(allowed)}")
        return value


class GateConfig(_Strict):
    """What a result must measure to be published."""

    min_gain: float = Field(
        0.02,
        description="Least gain in mean acceptance length over the verifier as it came, and over what is published.",
    )
    min_drafts: int = Field(2000, ge=1, description="Fewer drafts than this on either side is inconclusive, hence no.")


class PublishConfig(_Strict):
    """Where the result goes."""

    uri: str = Field(description="s3://bucket/prefix/ or file:///directory/; each result becomes a version below it.")
    base: str | None = Field(
        None, description="Where the model lies in the same store, so that unchanged shards need not be sent."
    )
    unchanged: Literal["copy", "refer"] = Field(
        "copy",
        description="Shards that the store has already: copied, so that a version is a whole directory; or referred to"
        " where they lie, which takes no time and no room (`fastmtp fetch` brings them together).",
    )
    alias: str | None = Field(
        None, pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="Name to move to the new version, beside `latest`."
    )
    keep: int | None = Field(
        None, ge=1, description="Newest versions to keep; older ones are deleted, never one that an alias names."
    )
    storage_class: str | None = Field(None, pattern=r"^[A-Z_]+$", description="S3 storage class of what is written.")
    kms_key: str | None = Field(None, min_length=1, description="Encrypt with SSE-KMS under this key id.")
    tags: dict[str, str] = Field(default_factory=dict, max_length=10, description="S3 object tags.")

    @field_validator("uri", "base")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        if value is None:
            return value
        if not value.startswith(("s3://", "file://")):
            raise ValueError("must start with s3:// or file://")
        if "@" in value.split("://", 1)[1].split("/", 1)[0]:
            raise ValueError("must not hold credentials; give the worker a profile or environment instead")
        return value

    @model_validator(mode="after")
    def _one_store(self) -> PublishConfig:
        if self.base and self.base.split("://")[0] != self.uri.split("://")[0]:
            raise ValueError("base must be in the store of uri")
        return self


class JobSpec(_Strict):
    """One fine-tuning job, as a user writes it."""

    model: str = Field(min_length=1, description="Checkpoint directory, s3:// prefix or published version, or hub id.")
    data: DataConfig
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig
    gate: GateConfig = GateConfig()
    publish: PublishConfig | None = Field(None, description="Nothing is published when absent.")

    @classmethod
    def parse(cls, value: object) -> JobSpec:
        """Validate a mapping. Raises ConfigError that names the first wrong field by JSON pointer."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            pointer = "/" + "/".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{pointer}: {first['msg']}.", mend="`fastmtp run --help` shows a job file.", pointer=pointer
            ) from error

    @classmethod
    def from_yaml(cls, path: Path) -> JobSpec:
        """Read a job file. Raises ConfigError when it is missing, is not YAML, or does not fit."""
        try:
            value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}.", mend="Name a job file.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}.") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: a job is a mapping with model, data and evaluate, not {type(value).__name__}.")
        return cls.parse(value)

    def to_yaml(self) -> str:
        """The job as YAML text that `from_yaml` reads back to an equal job."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
