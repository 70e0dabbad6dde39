"""Rows to train on: the verifier answers the prompts itself, and its hidden states after the final norm are stored.

Answers are kept as the token ids that were generated. They are journalled one by one, and states stored shard by shard,
in `.NAME.progress/` beside the target until the result is in place: a run that was killed goes on from there. Rows lie
in the order of the input. What is asked and who answers is `fastmtp.data.dialogues` and `fastmtp.data.engines`.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import fastmtp
from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import DataConfig
from fastmtp.data.answers import Journal
from fastmtp.data.conversations import Conversation
from fastmtp.data.dialogues import Asking, Dialogue, Turn, begin, count_reasons, length_fault
from fastmtp.data.engines.choosing import Backend, choose
from fastmtp.data.engines.loading import Loader
from fastmtp.data.online import write_ids
from fastmtp.data.prompts import read_conversations, select
from fastmtp.data.rendering import Rejected, Renderer
from fastmtp.data.selection import EVALUATED
from fastmtp.data.shards import Verifier, bytes_of
from fastmtp.data.states import COMPARED_ROWS, own_share, require_agreement, state_source
from fastmtp.data.store import INDEX, RowEntry, RowWriter, require_room
from fastmtp.errors import DataError
from fastmtp.families.base import text_config
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest, digest_of, run_stage
from fastmtp.table import size

if TYPE_CHECKING:
    from torch import Tensor

_KEPT_STATES = 0.25  # share of free memory in which states of answers wait until they are stored
_ASKED_ROWS = 16  # rows on which it is found out how much of an answer the verifier would have said itself
_OWN_SHARE = 0.9  # least share of greedy answers from elsewhere; rounding alone leaves more than 0.98


_Row = tuple[RowEntry, tuple[int, ...]]


def prepare(
    model: Path,
    config: DataConfig,
    target: Path,
    reporter: Reporter,
    *,
    evaluated: Collection[str] = (),
    replace: bool = False,
) -> Manifest:
    """Prepare training rows of `model` for the prompts of `config` into `target`, or go on with a run that was killed.

    Args:
        evaluated: roots of conversations that the head will be measured on; they are left out.

    Raises:
        DataError: no usable prompt, no row left to train on, or no room on the disk.
        ServingError: vLLM was to answer, and does not.
    """
    rejected: Counter[str] = Counter()
    chosen = select(read_conversations(config, rejected=rejected), config, rejected, evaluated=evaluated)
    checkpoint = open_checkpoint(model)
    verifier = Verifier.of(checkpoint)
    # No row is longer than the verifier can look back.
    positions = int(text_config(checkpoint.config).get("max_position_embeddings") or config.max_length)
    fitting = config.model_copy(update={"max_length": min(config.max_length, positions)})
    progress = target.parent / f".{target.name}.progress"

    def body(directory: Path) -> dict[str, Any]:
        return _Preparation(model, verifier, fitting, progress, reporter, rejected).run(chosen, directory)

    manifest = run_stage(
        "prepare", target, config=config.identity(), reporter=reporter, replace=replace, body=body,
        inputs={"model": verifier.fingerprint, "prompts": digest_of([one.key for one, _ in chosen])},
    )  # fmt: skip
    shutil.rmtree(progress, ignore_errors=True)
    return manifest


class _Preparation:
    """One run of the stage."""

    def __init__(
        self,
        model: Path,
        verifier: Verifier,
        config: DataConfig,
        progress: Path,
        reporter: Reporter,
        rejected: Counter[str],
    ) -> None:
        self._model, self._verifier, self._config = model, verifier, config
        self._progress, self._reporter, self._rejected = progress, reporter, rejected
        self._renderer = Renderer.of(model, config.template_args)
        self._loader = Loader(model, progress / "offload", config.offload)
        self._shards = progress / "rows"
        self._states: dict[int, Tensor] = {}  # place of a row -> [n, H], of those that the answers brought along
        self._found: dict[str, Any] = {}

    def run(self, chosen: Sequence[tuple[Conversation, str]], directory: Path) -> dict[str, Any]:
        """Prepare rows into `directory`. Returns the manifest's summary."""
        rows_in = len(chosen) + self._rejected.total()
        rows = self._kept(chosen) if self._config.responses == "keep" else self._answered(chosen)
        self._require_rows(rows)
        if self._config.hidden_states == "online":
            write_ids(directory, self._verifier, rows)
        else:
            self._store(rows, directory)
        entries = [entry for entry, _ in rows]
        return {
            "rows_in": rows_in,
            "conversations": len({entry.key for entry in entries}),
            "rows": len(rows),
            "rows_holdout": sum(entry.split == "holdout" for entry in entries),
            "rejected": dict(self._rejected),
            "finish": dict(Counter(entry.finish for entry in entries)),
            "tokens": sum(entry.length for entry in entries),
            "tokens_supervised": sum(entry.supervised for entry in entries),
            "hidden_states": "online" if self._config.hidden_states == "online" else "post_final_norm",
            **self._found,
        }

    def _answered(self, chosen: Sequence[tuple[Conversation, str]]) -> list[_Row]:
        """Rows that the verifier answers."""
        config = self._config
        dialogues = begin(chosen, every_turn=config.turns == "all")
        backend = choose(config)
        self._reporter.say(f"{backend.name} answers: {backend.why}")
        stored = config.hidden_states == "stored"
        kept = int(psutil.virtual_memory().available * _KEPT_STATES) if stored else 0
        with Journal(self._progress, self._identity(backend)) as journal:
            if not journal.resumed:
                shutil.rmtree(self._shards, ignore_errors=True)
            elif journal.known:
                self._reporter.say(f"going on with {len(journal.known):,} answers of a run that was stopped")
            asking = Asking(self._renderer, config, journal, self._reporter, kept)
            with backend.open(self._loader, self._renderer, self._progress) as engine:
                asking.run(dialogues, engine, self._require_room)
        left_out = count_reasons(dialogues, self._rejected)
        turns = [(dialogue, turn) for dialogue in dialogues for turn in dialogue.turns]
        self._found = {
            "backend": backend.name, "turns_left_out": dict(left_out), **asking.figures(),
            "reasoning": sum(bool(turn.message.get("reasoning_content")) for _, turn in turns),
            "tool_calls": sum(bool(turn.message.get("tool_calls")) for _, turn in turns),
        }  # fmt: skip
        rows = [_row_of(dialogue, turn) for dialogue, turn in turns]
        if backend.name == "vllm" and config.sampling.temperature == 0:
            self._require_own(rows)
        self._states = {place: turn.states for place, (_, turn) in enumerate(turns) if turn.states is not None}
        return rows

    def _kept(self, chosen: Sequence[tuple[Conversation, str]]) -> list[_Row]:
        """Rows of the answers that came with the prompts."""
        config = self._config
        self._reporter.phase("rendering the answers that were given")
        rows: list[_Row] = []
        rendered = self._renderer.all_answered_rows([one for one, _ in chosen], config.turns, config.max_length)
        for (one, split), found in zip(chosen, rendered, strict=True):
            if isinstance(found, Rejected):
                self._rejected[found.reason] += 1
                continue
            fitting = [row for row in found if not length_fault(row.spans[0][0], config)]
            if not fitting:
                self._rejected[length_fault(found[0].spans[0][0], config)] += 1
            for row in fitting:
                entry = RowEntry(
                    key=one.key, root=one.root, split=split, length=len(row.ids), prompt_length=row.spans[0][0],
                    finish=row.finish, turn=row.turn, spans=row.spans,
                )  # fmt: skip
                rows.append((entry, tuple(row.ids)))
        self._require_rows(rows)
        share = self._own_share(rows)
        self._reporter.say(
            f"warning: data.responses: keep. The verifier itself would have said {share:.0%} of the tokens of these"
            " answers; a draft counts only where it is what the verifier says, so the rest teaches nothing that is"
            " served. `self` lets it answer."
        )
        self._found = {"backend": "none", "own_share": round(share, 4)}
        return rows

    def _own_share(self, rows: Sequence[_Row]) -> float:
        """Share of the answers' tokens that the verifier would have said itself, by a few of the rows."""
        sample = [(ids, entry.answers) for entry, ids in rows[:: -(-len(rows) // _ASKED_ROWS)]]
        return own_share(self._loader.get(), sample, self._config.states_tokens)

    def _require_own(self, rows: Sequence[_Row]) -> None:
        """Raise DataError where greedy answers are not the verifier's."""
        if not rows:
            return
        share = self._own_share(rows)
        self._found["own_share"] = round(share, 4)
        if share < _OWN_SHARE:
            raise DataError(
                f"Only {share:.0%} of the tokens that vLLM answered are what {self._model} says by itself.",
                mend="Name a server of this very model, or use data.backend: transformers.", pointer="/data/server",
            )  # fmt: skip

    def _store(self, rows: Sequence[_Row], directory: Path) -> None:
        """States of all rows into shards; those that are there already are left as they are."""
        self._shards.mkdir(parents=True, exist_ok=True)
        ids = [row for _, row in rows]
        with RowWriter(self._shards, self._verifier, rows) as writer:
            missing = writer.missing()
            done = 0

            def advance(tokens: int) -> None:
                nonlocal done
                done += tokens
                self._reporter.advance(done)

            self._reporter.phase("storing its hidden states", sum(len(ids[place]) for place in missing), "tokens")
            self._require_agreement(set(missing), ids)
            with state_source(self._config, self._loader, self._progress) as source:
                for places in writer.shards():
                    wanted = [place for place in places if place not in self._states]
                    advance(sum(len(ids[place]) for place in places if place in self._states))
                    computed = source([ids[place] for place in wanted], advance)
                    self._states |= dict(zip(wanted, computed, strict=True))
                    for place in places:
                        writer.put(place, ids[place], self._states.pop(place))
            writer.close()
            for name in (INDEX, *sorted({entry.shard for entry in writer.entries})):
                _link(self._shards / name, directory / name)

    def _require_agreement(self, missing: set[int], ids: Sequence[tuple[int, ...]]) -> None:
        """Hold a few of the states that answers brought along against a forward pass."""
        there = sorted(self._states.keys() & missing)
        sample = {place: self._states[place] for place in there[:: -(-len(there) // COMPARED_ROWS) or 1]}
        if sample:
            require_agreement(sample, self._loader.get(), ids, "the answering pass")

    def _identity(self, backend: Backend) -> str:
        """Of what makes answers others, the prompt apart."""
        config = self._config
        return digest_of(
            {
                "model": self._verifier.fingerprint, "backend": backend.name, "sampling": config.sampling.model_dump(),
                "seed": config.seed, "room": [config.max_length, config.max_new_tokens],
                "version": fastmtp.__version__,
            }
        )  # fmt: skip

    def _require_room(self, least: int, most: int) -> None:
        """Refuse before anything is answered what cannot fit; the writer refuses what in the end does not."""
        if self._config.hidden_states == "stored":
            require_room(self._progress, least, self._verifier.hidden_size)
            low, high = (size(bytes_of(tokens, self._verifier.hidden_size)) for tokens in (least, most))
            self._reporter.say(f"hidden states will take between {low} and {high}")

    def _require_rows(self, rows: Sequence[_Row]) -> None:
        if not any(entry.split == "train" for entry, _ in rows):
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._rejected.most_common())
            measured = self._rejected[EVALUATED] > self._rejected.total() / 2
            raise DataError(
                f"{', '.join(self._config.sources)}: no row is left to train on ({reasons or 'all are held out'}).",
                mend="Name other prompts in data.prompts or evaluate.prompts." if measured
                else "Give more prompts, or raise data.max_length.", pointer="/data/prompts",
            )  # fmt: skip


def _row_of(dialogue: Dialogue, turn: Turn) -> _Row:
    one = dialogue.conversation
    ids = turn.prompt + turn.answer.token_ids
    entry = RowEntry(
        key=one.key, root=one.root, split=dialogue.split, length=len(ids), prompt_length=len(turn.prompt),
        finish=turn.finish, turn=turn.place,
    )  # fmt: skip
    return entry, ids


def _link(source: Path, target: Path) -> None:
    """Give a finished file its second name; where a disk has no links, its only one."""
    try:
        os.link(source, target)
    except OSError:
        source.rename(target)
