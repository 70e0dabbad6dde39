"""Datasets of the Hugging Face hub by name, through `datasets`: streamed, or from its cache where no hub answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastmtp.data.sources.directories import choose_split
from fastmtp.data.sources.lines import Row
from fastmtp.data.sources.tables import without_nulls
from fastmtp.errors import DataError


def read_hub(name: str, config: str | None, split: str | None) -> Iterator[Row]:
    """(row number from 1, row) of one split; `train`, or the only one, where none is named.

    Raises:
        DataError: there is no such dataset, configuration or split, or it cannot be read.
    """
    splits = _load(name, config)
    rows = splits[choose_split(f"hf:{name}", list(splits), split)]
    try:
        for number, row in enumerate(rows, start=1):
            yield number, without_nulls(row)
    except Exception as error:  # datasets lets through what its readers and the network raise
        raise _failure(name, error) from error


def _load(name: str, config: str | None) -> Any:  # noqa: ANN401 - split -> rows, by an untyped library
    import datasets

    try:
        try:
            return datasets.load_dataset(name, config, streaming=True)
        except ConnectionError:
            # No hub answers: the cache, which streaming does not use.
            return datasets.load_dataset(name, config)
    except Exception as error:  # anything, from its builders
        raise _failure(name, error) from error


def _failure(name: str, error: Exception) -> DataError:
    why = " ".join(str(error).split())[:300].rstrip(".")
    return DataError(
        f"hf:{name} does not load: {why}.", mend="Write hf:DATASET[:CONFIG[:SPLIT]], such as hf:openai/gsm8k:main."
    )
