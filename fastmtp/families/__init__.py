"""The families we know, found by the modules beside this one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from fastmtp.errors import CheckpointError
from fastmtp.families.base import Family, text_config


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
