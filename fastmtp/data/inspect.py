"""What a prepared directory holds: rows, why others were rejected, lengths, what is supervised, and three of the rows.

Reads manifest, index and the ids of three rows; no state, and of the model only its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, Field
from safetensors import safe_open

from fastmtp.data.store import RowEntry, read_index
from fastmtp.errors import DataError
from fastmtp.stage import read_manifest

_BINS = 12


class Bin(BaseModel):
    """Rows of `begin` tokens or more and fewer than `end`."""

    begin: int
    end: int
    rows: int


class Part(BaseModel):
    """Consecutive tokens of a row, all supervised or none."""

    text: str
    supervised: bool


class Sample(BaseModel):
    """A row as text; `token_ids` where no tokenizer is at hand."""

    key: str
    split: str
    finish: str
    tokens: int
    tokens_supervised: int
    parts: list[Part] = []
    token_ids: list[int] = []


class DataInspection(BaseModel):
    """What `fastmtp data inspect` found. Counts are those of the manifest; the rest is from the rows themselves."""

    directory: str
    rows_in: int = Field(description="Conversations read.")
    conversations: int = Field(description="Conversations that gave at least one row.")
    rejected: dict[str, int] = Field(description="Reason -> conversations left out for it.")
    rows: int
    rows_holdout: int
    finish: dict[str, int] = Field(description="How the last answers ended -> rows.")
    hidden_states: str
    tokens: int
    tokens_supervised: int
    share_supervised: float
    shortest: int
    median: int
    longest: int
    histogram: list[Bin]
    samples: list[Sample]

    @property
    def adds_up(self) -> bool:
        """Whether every conversation was used or is counted under a reason."""
        return self.rows_in == self.conversations + sum(self.rejected.values())


def inspect_data(directory: Path, model: str | Path | None = None) -> DataInspection:
    """Look at a result of prepare.

    Args:
        model: whose tokenizer shows rows as text; a directory or hub id.

    Raises:
        DataError: it is no result of prepare, or its rows do not read.
    """
    manifest = read_manifest(directory)
    if manifest.stage != "prepare":
        raise DataError(f"{directory} is a result of {manifest.stage}.", mend="Name one of prepare.")
    entries = read_index(directory)
    if not entries:
        raise DataError(f"{directory} holds no rows.", mend="Prepare the data again.")
    summary, lengths = manifest.summary, sorted(entry.length for entry in entries)
    tokens, supervised = sum(lengths), sum(entry.supervised for entry in entries)
    conversations = len({entry.key for entry in entries})
    rejected = summary.get("rejected", {})
    return DataInspection(
        directory=str(directory),
        rows_in=summary.get("rows_in", conversations + sum(rejected.values())),
        conversations=conversations,
        rejected=rejected,
        rows=len(entries),
        rows_holdout=sum(entry.split == "holdout" for entry in entries),
        finish=_counts(entries),
        hidden_states=str(summary.get("hidden_states", "not said")),
        tokens=tokens,
        tokens_supervised=supervised,
        share_supervised=supervised / tokens,
        shortest=lengths[0],
        median=lengths[len(lengths) // 2],
        longest=lengths[-1],
        histogram=_histogram(lengths),
        samples=list(_samples(directory, entries, model)),
    )


def plot_lengths(entries: Sequence[RowEntry], target: Path) -> None:
    """Lengths of rows and of what is supervised in them, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    series = {"whole rows": [entry.length for entry in entries], "supervised": [entry.supervised for entry in entries]}
    axes.hist(list(series.values()), bins=40, label=list(series), histtype="stepfilled", alpha=0.6)
    axes.set(xlabel="tokens", ylabel="rows", title=f"{len(entries):,} rows")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)


def _counts(entries: Sequence[RowEntry]) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        found[entry.finish] = found.get(entry.finish, 0) + 1
    return found


def _histogram(lengths: Sequence[int]) -> list[Bin]:
    """About _BINS bins as wide as a round number, from the one of the shortest row to that of the longest."""
    least = max(1, (lengths[-1] - lengths[0]) // _BINS)
    widths = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    width = next(width for width in widths if width >= least)
    bins = [
        Bin(begin=begin, end=begin + width, rows=0)
        for begin in range(lengths[0] // width * width, lengths[-1] + 1, width)
    ]
    for length in lengths:
        bins[(length - bins[0].begin) // width].rows += 1
    return bins


def _samples(directory: Path, entries: Sequence[RowEntry], model: str | Path | None) -> Iterator[Sample]:
    """The shortest, the middle and the longest row."""
    order = sorted(range(len(entries)), key=lambda place: entries[place].length)
    tokenizer = None
    if model is not None:
        from fastmtp.data.rendering import load_tokenizer

        tokenizer = load_tokenizer(model)
    for place in dict.fromkeys((order[0], order[len(order) // 2], order[-1])):
        entry = entries[place]
        ids = _ids(directory, entry)
        sample = Sample(
            key=entry.key, split=entry.split, finish=entry.finish, tokens=entry.length,
            tokens_supervised=entry.supervised,
        )  # fmt: skip
        if tokenizer is None:
            sample.token_ids = ids
        else:
            sample.parts = [
                Part(text=str(tokenizer.decode(ids[begin:end])), supervised=own) for begin, end, own in _runs(entry)
            ]
        yield sample


def _runs(entry: RowEntry) -> Iterator[tuple[int, int, bool]]:
    place = 0
    for begin, end in entry.answers:
        if begin > place:
            yield place, begin, False
        yield begin, end, True
        place = end
    if place < entry.length:
        yield place, entry.length, False


def _ids(directory: Path, entry: RowEntry) -> list[int]:
    with safe_open(directory / entry.shard, framework="np") as file:
        return [int(token) for token in file.get_slice("input_ids")[entry.offset : entry.offset + entry.length]]
