"""What people read: the acceptance table as Markdown, inspections and comparisons as text. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fastmtp.protocol import Measurement

if TYPE_CHECKING:
    from fastmtp.compare import Comparison, Difference
    from fastmtp.inspection import Inspection

_SHOWN = 20
# What each level of a fault is called, and in which colour.
_LEVELS = {"error": ("error", "red"), "serving": ("not served", "red"), "warning": ("warning", "yellow")}


def acceptance_table(figures: Mapping[str, Measurement]) -> str:
    """A row per head: acceptance per position, mean acceptance length, drafts; then the gain of `tuned` over `base`."""
    positions = max(len(found.acceptance) for found in figures.values())
    header = ["head", *(f"position {place}" for place in range(positions)), "mean acceptance length", "drafts"]
    rows = [
        [name, *(f"{rate:.3f}" for rate in found.acceptance), f"{found.mean_acceptance_length:.3f}", str(found.drafts)]
        for name, found in figures.items()
    ]
    if "base" in figures and "tuned" in figures:
        base, tuned = figures["base"], figures["tuned"]
        gains = [after - before for before, after in zip(base.acceptance, tuned.acceptance, strict=True)]
        length = tuned.mean_acceptance_length - base.mean_acceptance_length
        rows.append(["gain", *(f"{gain:+.3f}" for gain in gains), f"{length:+.3f}", ""])
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def size(count: float) -> str:
    """Bytes as people write them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def families_list(rows: Iterable[Mapping[str, Any]]) -> Group:
    """What `fastmtp families` shows a person: nine columns are too many for a terminal."""
    parts: list[Table | Text] = []
    for row in rows:
        state = "" if row["fine-tuned"] else ": read, verified and stitched, not fine-tuned yet"
        parts.append(Text(row["family"], style="bold").append(state, style="not bold"))
        grid = Table.grid(padding=(0, 2))
        types = ", ".join(row["model_type"])
        grid.add_row("", "config.json", f"model_type {types}; {row['declared in']}", style="none")
        grid.add_row("", "head", Text(row["head"]))
        step = (
            f"input {row['input']}, carries the state {row['carried state']}, first embedding {row['first embedding']}"
        )
        grid.add_row("", "a step", Text(step))
        grid.add_row("", "norms", f"gain {row['gain of a norm']}")
        parts.append(grid)
    return Group(*parts)


def inspection_table(found: Inspection) -> Group:
    """What `fastmtp inspect` shows a person: the model, its head, what a job would do, and what is wrong."""
    grid = Table.grid(padding=(0, 2))
    for name, value in _inspected(found):
        grid.add_row(Text(name, style="bold"), Text(value))
    parts: list[Table | Text] = [grid]
    for fault in found.faults:
        name, style = _LEVELS[fault.level]
        line = Text(f"{name}: ", style=style)
        parts.append(line.append(f"{fault.what} {fault.mend}".strip(), style="default"))
    parts.append(Text(f"{_verdict(found)}; looked at in {found.seconds:.2f} s", style="bold"))
    return Group(*parts)


def _verdict(found: Inspection) -> str:
    if found.usable:
        return "a job can use it as it is"
    wrong = sum(fault.level != "warning" for fault in found.faults)
    if wrong:
        return f"a job cannot use it as it is: {wrong} fault{'s' * (wrong > 1)}"
    return "it can be extracted, stitched and verified; heads of this family are not fine-tuned yet"


def _inspected(found: Inspection) -> list[tuple[str, str]]:
    family = found.family or "unknown"
    sizes = [f"{name} {value:,}" for name, value in found.sizes.items()] + ["tied embeddings"] * found.tied
    rows = [
        ("model", found.model),
        ("family", family),
        ("tensors", f"{found.tensors:,} in {found.files:,} files, {size(found.bytes)}"),
        ("types", ", ".join(f"{name} {size(count)}" for name, count in found.dtypes.items())),
        ("quantised", found.quantisation or "no"),
        ("sizes", ", ".join(sizes)),
    ]
    if found.head:
        head = found.head
        experts = {"dense": "dense", "split": "experts one by one", "fused": "experts stacked"}[head.layout]
        types = ", ".join(head.dtypes)
        rows.append(("head", f"whole: {head.tensors:,} tensors {head.prefix}*, {size(head.bytes)}, {types}, {experts}"))
        rows += [("", f"{size(count)} in {name}") for name, count in head.files.items()]
        rows += [("", f"copy inside the head, left as it is: {key}") for key in head.copies]
    else:
        rows.append(("head", "none that can be used"))
    if found.job:
        job = found.job
        reads = f"{size(job.read_by_extract)} to extract, {size(job.read_by_train)} to train, all of it in vLLM"
        writes = (
            f"{size(job.written_by_stitch)} to stitch ({size(job.written_by_stitch_as_copy)} where files cannot be "
        )
        writes += f"linked), {size(job.states_per_1000_tokens)} of hidden states per 1,000 tokens"
        rows += [("a job reads", reads), ("a job writes", writes)]
    return rows


def comparison_table(found: Comparison) -> Group:
    """What `fastmtp verify` shows a person."""
    parts: list[Padding | Text] = []
    if found.differences and not found.head:
        parts.append(Text("A's own head was not found, so nothing counts as the head: `fastmtp inspect` says why"))
    for title, of_head in (("outside the head", False), ("in the head", True)):
        chosen = [difference for difference in found.differences if difference.of_head is of_head]
        if chosen:
            parts += [Text(f"{title}: {_kinds(chosen)}", style="bold"), *_compared(chosen[:_SHOWN])]
        if len(chosen) > _SHOWN:
            parts.append(Text(f"  and {len(chosen) - _SHOWN:,} more; --json has all"))
    parts += [Text(f"{name}: {how}") for name, how in found.side_files.items()]
    same = found.tensors - len(found.differences)
    verdict = {
        "identical": "identical", "exactly the head": "they differ in exactly the head",
        "part of the head": "they differ in part of the head and nothing else",
        "more than the head": "they differ in more than the head",
    }[found.verdict]  # fmt: skip
    text = f"{verdict}: {same:,} of {found.tensors:,} tensors are the same, {size(found.bytes_read)} read of each"
    parts.append(Text(text, style="bold"))
    return Group(*parts)


def _kinds(differences: Iterable[Difference]) -> str:
    counts = Counter(difference.what for difference in differences)
    return ", ".join(f"{count:,} {_named(what)}" for what, count in counts.items())


def _compared(differences: Iterable[Difference]) -> Iterator[Padding | Text]:
    """The differences by file, each with its tensors."""
    files: dict[str, Table] = {}
    for one in differences:
        name = one.file_b or one.file_a or ""
        table = files.setdefault(name, Table.grid(padding=(0, 2, 0, 0)))
        change = "" if one.change is None else f", by {one.change:.2%}"
        table.add_row(Text(one.key, overflow="fold"), Text(_named(one.what) + change, no_wrap=True))
    for name, table in sorted(files.items()):
        yield from (Text(f"  {name}"), Padding(table, (0, 0, 0, 4)))


def _named(what: str) -> str:
    return what if what.startswith("only") else f"with other {what}"
