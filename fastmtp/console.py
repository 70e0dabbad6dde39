"""What the verbs of the command line share: the option --json, and how a result is printed."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def print_result(value: dict[str, Any], as_json: bool, text: str) -> None:
    """The one result of a command on stdout: as JSON, or as text for people."""
    sys.stdout.write((json.dumps(value) if as_json else text) + "\n")
