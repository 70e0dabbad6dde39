"""The job schema: one set of pydantic models behind the command line, REST and the flow's parameters.

Loads no torch. `JobSpec.from_yaml` and `to_yaml` are exact inverses; unknown fields are refused, so that a typing error
never silently falls back to a default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from fastmtp.data.window import Window
from fastmtp.errors import ConfigError
from fastmtp.schema import (
    WINDOW,
    Column,
    Fraction,
    LossKind,
    RowFormat,
    ServerArgs,
    SetName,
    Sources,
    Strict,
    Temperature,
    faults_in,
)

__all__ = [
    "DataConfig",
    "EvaluateConfig",
    "GateConfig",
    "JobSpec",
    "PublishConfig",
    "SamplingConfig",
    "SpeedConfig",
    "TrainConfig",
    "faults_in",
]


class SamplingConfig(Strict):
    """How the verifier picks a token. Temperature 0 is greedy; a seed makes one request repeatable."""

    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus: least set of tokens with this probability.")
    top_k: int = Field(0, ge=0, description="Choose among this many tokens; 0: all.")


class DataConfig(Strict):
    """Prompts to train on, how the verifier answers them, and where its hidden states are kept."""

    prompts: Sources = Field(
        description="Where prompts lie, one or several: JSONL or Parquet (a path, file:// or s3:// URI, a glob, a"
        " directory or s3:// prefix), or hf:DATASET[:CONFIG[:SPLIT]], a hub dataset or a local dataset directory."
    )
    format: RowFormat = Field(
        "auto",
        description="messages: OpenAI chat. completion: prompt and answer. text: plain text. log: stored requests,"
        " with or without the response. auto: told from each row.",
    )
    columns: dict[Column, str] = Field(
        default_factory=dict, description="Names of your columns: {prompt: question, completion: answer}."
    )
    since: str | None = Field(
        None, pattern=WINDOW, description="Only what was logged at or after this: 2026-11-23, a time, or 7d (ago)."
    )
    until: str | None = Field(None, pattern=WINDOW, description="Only what was logged before this.")
    deduplicate: bool = Field(True, description="Use a conversation that occurs again once.")
    min_prompt_tokens: int = Field(1, ge=1, description="Shorter prompts are left out.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Longer prompts are left out.")
    max_samples: int | None = Field(
        None, ge=1, description="Use at most this many prompts (seeded choice); all when unset."
    )
    holdout: Fraction = Field(0.05, description="Share of conversations kept out of training for the estimate.")
    seed: int = Field(0, ge=0, description="Seed of the choice of prompts, and of sampled answers.")
    responses: Literal["self", "keep"] = Field(
        "self", description="self: the verifier's own answers. keep: those that came with the prompts, which it may"
        " not have said: the head then learns to draft another model."
    )  # fmt: skip
    turns: Literal["last", "all"] = Field(
        "last", description="Which turns of a conversation are answered: the last, or one after the other."
    )
    template_args: dict[str, bool | int | str] = Field(
        default_factory=dict, description="Arguments of the chat template, such as {enable_thinking: false}."
    )
    sampling: SamplingConfig = SamplingConfig()
    backend: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="Who answers. auto: vLLM where there is a GPU or a server, transformers elsewhere."
    )
    server: str | None = Field(
        None, pattern=r"^https?://[^@\s]+$", description="URL of a vLLM server of this very model that answers."
    )
    server_args: ServerArgs = Field((), description="More arguments for vLLM's server, as in evaluate.server_args.")
    speculate: bool = Field(True, description="vLLM answers with the native head drafting, which is faster.")
    concurrency: int = Field(64, ge=1, description="Requests in flight at once, under vLLM.")
    batch_size: int = Field(32, ge=1, description="Prompts answered at once, under transformers.")
    max_length: int = Field(4096, ge=8, le=1_048_576, description="Longest row, prompt and answer, in tokens.")
    max_new_tokens: int = Field(512, ge=1, description="Longest answer, in tokens.")
    hidden_states: Literal["stored", "online"] = Field(
        "stored", description="stored: on disk, tokens x hidden size x 2 bytes. online: computed again in training,"
        " nothing on disk; the verifier stays in memory and each epoch costs its forward pass."
    )  # fmt: skip
    states_from: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="Who computes them. auto: transformers; vllm needs a GPU."
    )
    states_tokens: int = Field(8192, ge=8, description="Tokens of one forward pass of the verifier, padding included.")
    offload: bool | Literal["auto"] = Field(
        "auto", description="Run the verifier layer by layer from disk when it does not fit into the device's memory."
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of prompts, in order."""
        return (self.prompts,) if isinstance(self.prompts, str) else self.prompts

    def identity(self) -> dict[str, Any]:
        """What makes the rows others. How many requests run at once, or who computes states, does not."""
        return self.model_dump(
            exclude={"concurrency", "batch_size", "states_tokens", "states_from", "offload", "server", "server_args"}
        )

    @model_validator(mode="after")
    def _fits_together(self) -> DataConfig:
        if self.server and self.backend == "transformers":
            raise ValueError("server names a vLLM server, but backend is transformers; leave one of them out")
        if self.responses == "keep" and self.server:
            raise ValueError("with responses: keep nobody answers; leave server out")
        Window.of(self.since, self.until)
        return self


class TrainConfig(Strict):
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


class SpeedConfig(Strict):
    """Output tokens per second and inter-token latency: without speculation, with the native head, with the tuned."""

    concurrencies: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 8, 32), min_length=1, description="Requests in flight at once, one measurement each."
    )
    num_prompts: int = Field(64, ge=1, description="Requests of one measurement.")
    rounds: int = Field(3, ge=1, description="Times that each is measured, in turn with the others; medians count.")


class EvaluateConfig(Strict):
    """How acceptance is measured, by vLLM itself, before and after."""

    prompts: str | dict[SetName, str] = Field(
        description="Prompts the head was not trained on, in the forms of data.prompts; several sets by name:"
        " {gsm8k: ..., traffic: ...}. The gate wants a gain on each."
    )
    format: RowFormat = Field("auto", description="Form of the rows of every set, as data.format.")
    columns: dict[Column, str] = Field(default_factory=dict, description="Names of your columns, as data.columns.")
    num_prompts: int = Field(200, ge=1, description="How many of each set, in file order.")
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="Draft tokens per step, K.")
    sweep: tuple[Annotated[int, Field(ge=1, le=16)], ...] = Field(
        (), description="Further K to measure, such as [1, 2, 4, 5]; each takes a start of vLLM per head."
    )
    max_tokens: int = Field(512, ge=1, description="Longest answer, in tokens.")
    temperature: Temperature | tuple[Temperature, ...] = Field(
        0.0, description="0 is greedy. Several: [0, 1]; the gate decides on the first."
    )
    draft_sampling: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="How vLLM picks draft tokens at a temperature above 0."
    )
    template_args: dict[str, bool | int | str] = Field(
        default_factory=dict, description="Arguments of the chat template, as in data.template_args."
    )
    warmup: int = Field(4, ge=0, description="Prompts answered first and not counted.")
    lossless: bool = Field(
        True, description="Compare greedy answers with those of vLLM without speculation; takes one more start."
    )
    reference: bool = Field(
        True, description="Walk the answers without vLLM as a cross-check; takes one forward pass of the verifier."
    )
    speed: SpeedConfig | None = Field(None, description="Measure speed too; `speed: {}` takes the defaults.")
    prefix_caching: bool = Field(
        False, description="vLLM's prefix caching; on hybrid models with MTP it gives wrong answers."
    )
    concurrency: int = Field(64, ge=1, description="Requests in flight at once.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("bfloat16", description="vLLM's --dtype.")
    server_args: ServerArgs = Field(
        (), description="More arguments for vLLM's server, such as --tensor-parallel-size 8."
    )

    @property
    def sets(self) -> dict[str, str]:
        """Name -> source of each prompt set; one that has no name is `prompts`."""
        return {"prompts": self.prompts} if isinstance(self.prompts, str) else dict(self.prompts)

    def reading(self, source: str) -> DataConfig:
        """How a set is read."""
        return DataConfig(prompts=source, format=self.format, columns=self.columns)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures, the one that the gate decides on first."""
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @model_validator(mode="after")
    def _has_something_to_measure(self) -> EvaluateConfig:
        if not self.sets or not self.temperatures:
            raise ValueError("at least one prompt set and one temperature")
        return self


class GateConfig(Strict):
    """What a result must measure to be published."""

    min_gain: float = Field(
        0.02,
        description="Least gain in mean acceptance length over the verifier as it came, and over what is published:"
        " the lower bound of its interval must reach it.",
    )
    confidence: float = Field(0.95, ge=0.5, lt=1.0, description="Of the intervals (paired bootstrap over prompts).")
    position_tolerance: float = Field(
        0.02, ge=0.0, le=1.0, description="How much lower the rate of any one position may be than before."
    )
    require_lossless: bool = Field(
        True, description="No when greedy answers differ from those without speculation by more than numerical ties."
    )
    min_drafts: int = Field(2000, ge=1, description="Fewer drafts than this on either side is inconclusive, hence no.")


_HUB_BRANCH = re.compile(r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HUB_COMMIT = re.compile(r"@[0-9a-f]{40}$")


class PublishConfig(Strict):
    """Where the result goes."""

    uri: str = Field(
        description="s3://bucket/prefix/ or file:///directory/: each result becomes a version below it. Or"
        " hf://org/name[@branch]: each result becomes a commit; a repository that is not there is made, private."
    )
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
    def _known_scheme(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return value
        if info.field_name == "uri" and value.startswith("hf://"):
            if not _HUB_BRANCH.fullmatch(value) or _HUB_COMMIT.search(value):
                raise ValueError("must be hf://org/name or hf://org/name@branch")
            return value
        if not value.startswith(("s3://", "file://")):
            raise ValueError("must start with s3:// or file://" + (", or hf://" if info.field_name == "uri" else ""))
        if "@" in value.split("://", 1)[1].split("/", 1)[0]:
            raise ValueError("must not hold credentials; give the worker a profile or environment instead")
        return value

    @model_validator(mode="after")
    def _one_store(self) -> PublishConfig:
        if self.uri.startswith("hf://"):
            if chosen := sorted(self.model_dump(exclude={"uri"}, exclude_defaults=True)):
                raise ValueError(f"{', '.join(chosen)}: only for s3:// and file://; on the hub, name a branch")
            return self
        if self.base and self.base.split("://")[0] != self.uri.split("://")[0]:
            raise ValueError("base must be in the store of uri")
        return self


class JobSpec(Strict):
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
            pointer, message = faults_in(value, error.errors())[0]
            raise ConfigError(
                f"{pointer}: {message}.", mend="`fastmtp run --help` shows a job file.", pointer=pointer
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
