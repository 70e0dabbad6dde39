"""Any source of prompts as its files, or as the dataset of the hub that it names; and as rows, one after the other.

PATH, file://, s3://           a file, a glob, or all JSONL, JSON, Parquet and text files below a folder
a dataset directory            the split `train` of its default configuration
hf:/DIRECTORY[:CONFIG[:SPLIT]] the same, with another configuration or split
hf:DATASET[:CONFIG[:SPLIT]]    a dataset of the hub
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastmtp.data.sources.directories import files_of_split, is_dataset
from fastmtp.data.sources.hub import read_hub
from fastmtp.data.sources.lines import Row, read_lines
from fastmtp.data.sources.places import SourceFile, changed_since, files_of, is_glob
from fastmtp.data.sources.tables import read_table
from fastmtp.errors import CheckpointError, DataError
from fastmtp.files import local_path


@dataclass(frozen=True)
class DatasetName:
    """A dataset, by directory or by its name on the hub."""

    place: str
    config: str | None
    split: str | None

    @property
    def is_local(self) -> bool:
        """Whether it is a directory here."""
        return self.place.startswith(("/", "./", "../", "~")) or self.place in (".", "..")


def dataset_name(source: str) -> DatasetName | None:
    """What an hf: source names; None for other sources. Raises DataError where it names nothing."""
    if not source.startswith("hf:"):
        return None
    place, *rest = source.removeprefix("hf:").split(":")
    if not place or len(rest) > 2:
        raise DataError(f"{source} is not hf:DATASET[:CONFIG[:SPLIT]].", mend="For example hf:openai/gsm8k:main:train.")
    config, split = (*(part or None for part in rest), None, None)[:2]
    return DatasetName(place, config, split)


def list_files(source: str) -> list[SourceFile] | None:
    """The files of a source; None where it is a dataset of the hub, whose files `datasets` finds.

    Raises:
        DataError: there are none, or the place cannot be looked at.
    """
    named = dataset_name(source)
    if named is not None:
        return files_of_split(_directory(named.place), named.config, named.split) if named.is_local else None
    if not source.startswith("s3://") and not is_glob(source):
        if "://" in source and not source.startswith("file://"):
            raise DataError(f"{source} is of an unknown kind.", mend="Name a path, file://, s3:// or hf:DATASET.")
        root = _directory(source)
        if is_dataset(root):
            return files_of_split(root, None, None)
    return files_of(source)


def open_source(source: str, since: float | None = None) -> Iterator[tuple[str, Iterator[Row]]]:
    """(name, rows) of each file of a source, without those that cannot hold anything logged at or after `since`.

    Raises:
        DataError: no file, or one that cannot be read.
    """
    files = list_files(source)
    if files is None:
        named = dataset_name(source)
        assert named is not None
        yield source, read_hub(named.place, named.config, named.split)
        return
    for file in changed_since(files, since):
        yield file.name, read_file(file)


def read_file(file: SourceFile) -> Iterator[Row]:
    """The rows of a file, by its kind."""
    return read_table(file) if file.name.endswith(".parquet") else read_lines(file)


def _directory(source: str) -> Path:
    try:
        return local_path(source)
    except CheckpointError as error:
        raise DataError(error.what, mend="Name a file or directory.") from error
