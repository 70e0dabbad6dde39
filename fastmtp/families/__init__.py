"""The families we know, found by the modules beside this one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from fastmtp.errors import CheckpointError
from fastmtp.families.base import Family, text_config

# Columns of `rows` that hold names out of checkpoints.
_NAMES = ("model_type", "head", "declared in")


def families() -> dict[str, Family]:
    """Every family, by name: each module of this package that defines FAMILY."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return found


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises CheckpointError for one we do not know."""
    model_type = str(text_config(config).get("model_type") or config.get("model_type"))
    for family in families().values():
        if model_type in family.model_types or config.get("model_type") in family.model_types:
            return family
    known = ", ".join(sorted(name for family in families().values() for name in family.model_types))
    raise CheckpointError(
        f"model_type {model_type!r} is no family we know.", mend=f"Known are: {known}.", pointer="/model"
    )


def rows() -> list[dict[str, Any]]:
    """Each family as one JSON-able record: what `fastmtp families` and the documentation show."""
    return [
        {
            "family": family.title, "model_type": list(family.model_types), "head": f"{family.prefix}*",
            "declared in": family.layers_field, "input": f"[{', '.join(family.concat)}]",
            "carried state": family.carried, "gain of a norm": family.norm,
            "first embedding": "zeroed" if family.zero_first_embedding else "kept",
            "fine-tuned": family.trainable,
        }
        for family in sorted(families().values(), key=lambda family: (not family.trainable, family.name))
    ]  # fmt: skip


def families_table() -> str:
    """`rows` as a Markdown table."""
    found = rows()
    lines = [list(found[0]), ["---"] * len(found[0])]
    lines += [[_cell(name, value) for name, value in row.items()] for row in found]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "not yet"
    items = value if isinstance(value, list) else [value]
    return ", ".join(f"`{item}`" if name in _NAMES else str(item) for item in items)
