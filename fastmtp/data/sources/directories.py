"""A dataset directory laid out as on the Hugging Face hub: configurations and splits, from its README or file names.

What the README may say is the hub's `configs` (https://huggingface.co/docs/hub/datasets-manual-configuration), and file
names tell the split as there (https://huggingface.co/docs/hub/datasets-file-names-and-splits). Its files are read by
the readers of this package, so nothing is copied into a cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fastmtp.data.sources.places import SourceFile, glob_pattern, is_data, local_file
from fastmtp.errors import DataError
from fastmtp.files import hidden

README = "README.md"
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d+")
_HEADER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


def is_dataset(root: Path) -> bool:
    """Whether a directory is laid out as a dataset, so that one of its splits is meant rather than every file."""
    return root.is_dir() and ((root / README).is_file() or any(root.glob("data/*.parquet")))


def files_of_split(root: Path, config: str | None, split: str | None) -> list[SourceFile]:
    """Files of one split, by name; of the default configuration, and of `train`, where they are not named.

    Raises:
        DataError: there is no such configuration or split, or the README asks for files elsewhere.
    """
    if not root.is_dir():
        raise DataError(f"{root} is no directory.", mend="Name a dataset directory: hf:/DIRECTORY[:CONFIG[:SPLIT]].")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if is_data(path.name))
    names = [name for name in names if not hidden(name)]
    splits = _splits(root, names, config)
    if not splits:
        raise DataError(f"{root} holds no JSONL or Parquet file.", mend="Only these are read from a dataset directory.")
    chosen = choose_split(str(root), list(splits), split)
    return [local_file(root / name) for name in splits[chosen]]


def choose_split(where: str, splits: list[str], split: str | None) -> str:
    """The split asked for; else `train`, or the only one there is. Raises DataError."""
    wanted = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
    if wanted not in splits:
        what = f"{where} has no split {wanted}." if wanted else f"{where} has several splits, and none is train."
        raise DataError(what, mend=f"Name one as hf:DATASET:CONFIG:SPLIT; there are {', '.join(splits)}.")
    return wanted


def _splits(root: Path, names: list[str], config: str | None) -> dict[str, list[str]]:
    """Split -> its files. What a `data` folder holds goes before what lies elsewhere."""
    configs = _configs(root)
    if not configs:
        if config not in (None, "default"):
            raise DataError(f"{root} has no configuration {config}.", mend="Its README names none: leave it out.")
        inside = [name for name in names if name.startswith("data/")]
        return _by_name(inside or names)
    entry = _config(root, configs, config)
    folder = _inside(root, str(entry.get("data_dir", ""))).strip("/")
    if "data_files" not in entry:
        return _by_name([name for name in names if not folder or name.startswith(f"{folder}/")])
    found: dict[str, list[str]] = {}
    for split, patterns in _patterns(entry["data_files"]):
        for pattern in patterns:
            wanted = f"{folder}/{_inside(root, pattern)}" if folder else _inside(root, pattern)
            matched = [name for name in names if glob_pattern(wanted.removeprefix("./")).fullmatch(name)]
            found.setdefault(split, []).extend(name for name in matched if name not in found[split])
    return {split: files for split, files in found.items() if files}


def _configs(root: Path) -> list[dict[str, Any]]:
    """The README's `configs`; none where it has none."""
    try:
        header = _HEADER.match((root / README).read_text(encoding="utf-8"))
        found = (yaml.safe_load(header[1]) or {}).get("configs", []) if header else []
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise DataError(f"{root / README} does not begin with readable YAML.", mend="Mend its header.") from error
    listed = found if isinstance(found, list) else []
    return [entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get("config_name"), str)]


def _config(root: Path, configs: list[dict[str, Any]], wanted: str | None) -> dict[str, Any]:
    by_name = {entry["config_name"]: entry for entry in configs}
    defaults = [entry for entry in configs if entry.get("default") or entry["config_name"] == "default"]
    if wanted is None and (defaults or len(configs) == 1):
        return defaults[0] if defaults else configs[0]
    if wanted not in by_name:
        what = f"has no configuration {wanted}" if wanted else "has several configurations"
        raise DataError(f"{root} {what}.", mend=f"Name one as hf:{root}:CONFIG; there are {', '.join(by_name)}.")
    return by_name[wanted]


def _patterns(value: Any) -> list[tuple[str, list[str]]]:  # noqa: ANN401 - YAML
    """(split, patterns) of `data_files`: one pattern, several, or several splits."""
    items = value if isinstance(value, list) else [value]
    found = []
    for item in items:
        named = isinstance(item, Mapping)
        paths = item.get("path", []) if named else item
        split = str(item.get("split", "train")) if named else "train"
        found.append((split, [str(path) for path in (paths if isinstance(paths, list) else [paths])]))
    return found


def _inside(root: Path, pattern: str) -> str:
    """A pattern that stays in the directory: a dataset must not name other files, or hosts. Raises DataError."""
    if "://" in pattern or pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
        raise DataError(f"{root / README} names {pattern}, which is not in the directory.", mend="Name files in it.")
    return pattern


def _by_name(names: list[str]) -> dict[str, list[str]]:
    """Files by the split that their name, or a folder's, tells; all of them `train` where none tells."""
    found: dict[str, list[str]] = {}
    for name in names:
        if shard := _SHARD.match(name):
            found.setdefault(shard[1], []).append(name)
    for split, words in _SPLITS.items() if not found else ():
        told = re.compile(rf"(?:^|[-._ /0-9])(?:{'|'.join(words)})(?:[-._ /0-9]|$)")
        files = [name for name in names if told.search(name)]
        if files:
            found[split] = files
    return found or ({"train": names} if names else {})
