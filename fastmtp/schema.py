"""What the job schema is made of: strictness, the types of its fields, and where in a user's own value a fault lies.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LossKind = Literal["ce", "kl", "tv"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Strict(BaseModel):
    """Unknown fields are refused, and a value does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def faults_in(value: object, errors: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """JSON pointer (RFC 6901) into `value` and message of each of pydantic's errors.

    Where a field takes one of several forms, pydantic reports what is wrong with each: those that came no deeper than
    another did are left out.
    """
    found = [(_pointer(value, error["loc"], error["type"]), str(error["msg"])) for error in errors]
    return [
        (pointer, message)
        for pointer, message in found
        if not any(other.startswith(f"{pointer}/") for other, _ in found)
    ]


def _pointer(value: object, location: Sequence[str | int], kind: str) -> str:
    """Without the alternatives of a union, which pydantic names in its locations and nobody wrote."""
    parts: list[str] = []
    for place, part in enumerate(location):
        items = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(items, Mapping) and part in items:
            value = items[part]
        elif kind != "missing" or place < len(location) - 1:
            continue
        parts.append(str(part).replace("~", "~0").replace("/", "~1"))
    return "".join(f"/{part}" for part in parts)


def _sizes_only(value: tuple[str, ...]) -> tuple[str, ...]:
    """Only flags that size the server are let through: a job must not widen what the operator allows."""
    for word in value:
        if word.startswith("-") and word.split("=", 1)[0] not in _SERVER_ARGS:
            raise ValueError(f"server argument {word} is not allowed; allowed are {', '.join(_SERVER_ARGS)}")
    return value


_SERVER_ARGS = (
    "--tensor-parallel-size", "--pipeline-parallel-size", "--gpu-memory-utilization", "--max-num-seqs",
    "--max-num-batched-tokens", "--enable-expert-parallel", "--max-model-len", "--kv-cache-dtype", "--swap-space",
    "--enforce-eager",
)  # fmt: skip
ServerArgs = Annotated[tuple[str, ...], AfterValidator(_sizes_only)]
RowFormat = Literal["auto", "messages", "sharegpt", "completion", "text", "log"]
Sources = str | Annotated[tuple[str, ...], Field(min_length=1)]
# Our names of what a row may hold -> the user's.
Column = Literal["messages", "prompt", "completion", "system", "tools", "time"]
# A date, a time with or without zone, or a length of time before now.
WINDOW = r"^(\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(Z|[+-]\d\d:?\d\d)?)?|\d+[hdw])$"
SetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}$")]
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
