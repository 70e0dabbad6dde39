"""Rows of a Parquet file, a batch at a time; of a remote one only the parts that are read are fetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastmtp.data.sources.lines import Row
from fastmtp.data.sources.places import SourceFile
from fastmtp.errors import DataError

_BATCH = 512


def read_table(file: SourceFile) -> Iterator[Row]:
    """(row number from 1, row). Fields that a row does not have are left out, at any depth: a table spells them null.

    Raises:
        DataError: it is no Parquet file, or cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with file.open() as stream, pyarrow.parquet.ParquetFile(stream) as table:
            for batch in table.iter_batches(_BATCH, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{file.name} cannot be read as Parquet: {why}.", mend="Name a whole Parquet file.") from error


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The value without null fields."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
