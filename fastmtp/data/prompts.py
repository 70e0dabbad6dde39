"""Read prompts: one conversation per line of a JSONL file, in the forms people have them.

A line is an object with one of `messages` (OpenAI's chat form), `prompt` (with or without `completion`), `question`
(with or without `answer`) or `text`. Sources: a path, file://, s3://, or hf:DATASET:CONFIG:SPLIT. Loads no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastmtp.errors import DataError
from fastmtp.stage import digest_of

_PLAIN = (("prompt", "completion"), ("question", "answer"), ("text", "completion"))


@dataclass(frozen=True)
class Prompt:
    """One conversation up to the point where the verifier answers.

    Attributes:
        key: digest of the messages: the same prompt has the same key in every file and run.
        messages: OpenAI chat messages, the last one not the assistant's.
        answer: the answer that came with it, if one did.
    """

    key: str
    messages: tuple[dict[str, str], ...]
    answer: str | None


def read_prompts(source: str, *, limit: int | None = None, rejected: Counter[str] | None = None) -> list[Prompt]:
    """Prompts of a source in file order, duplicates left out; `limit` stops early, `rejected` counts lines by reason.

    Raises:
        DataError: the source does not read, or has no usable line.
    """
    counts: Counter[str] = Counter() if rejected is None else rejected
    prompts: dict[str, Prompt] = {}
    for line in _lines(source):
        parsed = _parse(line)
        if isinstance(parsed, str):
            counts[parsed] += 1
            if counts.total() > 1000 and not prompts:
                break
        elif parsed.key in prompts:
            counts["duplicate"] += 1
        else:
            prompts[parsed.key] = parsed
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        why = ", ".join(f"{count} {reason}" for reason, count in counts.most_common(3)) or "it is empty"
        raise DataError(
            f"{source} has no usable row: {why}.",
            mend='Each line must be a JSON object with "messages", "prompt", "question" or "text".',
        )
    return list(prompts.values())


def _lines(source: str) -> Iterator[str]:
    if source.startswith("hf:"):
        yield from _hub_rows(source)
        return
    if source.startswith("s3://"):
        from fastmtp.storage import read_bytes

        yield from read_bytes(source).decode("utf-8", "replace").splitlines()
        return
    path = Path(source.removeprefix("file://"))
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DataError(f"{path}: {reason}.", mend="Name a readable JSONL file.") from error


def _hub_rows(source: str) -> Iterator[str]:
    try:
        _, name, config, split = source.split(":")
    except ValueError as error:
        raise DataError(
            f"{source} is not hf:DATASET:CONFIG:SPLIT.", mend="For example hf:openai/gsm8k:main:train."
        ) from error
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises anything from its builders
        raise DataError(f"{source} does not load: {' '.join(str(error).split())[:300]}") from error
    for row in rows:
        yield json.dumps(row, default=str)


def _parse(line: str) -> Prompt | str:
    """A prompt, or the reason why the line is none."""
    if not line.strip():
        return "blank line"
    try:
        row = json.loads(line)
    except ValueError:
        return "not JSON"
    if not isinstance(row, dict):
        return "not an object"
    if "messages" in row:
        return _from_messages(row["messages"])
    for field, answer_field in _PLAIN:
        if isinstance(row.get(field), str) and row[field].strip():
            answer = row.get(answer_field)
            return _prompt([{"role": "user", "content": row[field]}], answer if isinstance(answer, str) else None)
    return "no prompt field"


def _from_messages(messages: Any) -> Prompt | str:  # noqa: ANN401 - JSON
    if not isinstance(messages, list) or not messages:
        return "messages is no list"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return "a message without a role"
        if not isinstance(message.get("content"), str):
            return "a message whose content is not text"
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    answer = None
    if plain[-1]["role"] == "assistant":
        answer = plain.pop()["content"]
    if not plain or plain[-1]["role"] not in ("user", "tool"):
        return "no user message to answer"
    return _prompt(plain, answer)


def _prompt(messages: list[dict[str, str]], answer: str | None) -> Prompt:
    return Prompt(key=digest_of(messages), messages=tuple(messages), answer=answer)
