"""The prepare stage on a small verifier with random weights: rows are what it says, and a kill costs nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import DataConfig, SamplingConfig
from fastmtp.data import prepare as stage
from fastmtp.data.answers import JOURNAL, OnAnswer
from fastmtp.data.engines.local import LocalEngine
from fastmtp.data.prepare import prepare
from fastmtp.data.prompts import roots_of
from fastmtp.data.shards import Verifier
from fastmtp.data.states import disagreement
from fastmtp.data.store import RowStore
from fastmtp.errors import DataError, IntegrityError
from fastmtp.progress import Reporter
from fastmtp.servers.client import Answer, Request
from fastmtp.stage import Manifest, read_manifest
from tests.fastmtp.fixtures import write_checkpoint

WORDS = ["some", "words", "to", "answer", "with", "care", "and", "more", "of", "them"]
DATA = DataConfig(prompts="", max_length=80, max_new_tokens=24, batch_size=5, holdout=0.25)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines: list[dict[str, object]] = [{"prompt": " ".join(WORDS[: 1 + n % 9]) + f" {n}"} for n in range(40)]
    file.write_text("\n".join(json.dumps(line) for line in [*lines, {"prompt": "x" * 200}, lines[0]]) + "\n")
    return file


@pytest.fixture(scope="module")
def data(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("data") / "d"
    run_prepare(model, target, prompts=str(prompts))
    return target


def run_prepare(model: Path, target: Path, *, evaluated: Sequence[str] = (), **changes: object) -> Manifest:
    config = DATA.model_copy(update=changes)
    return prepare(model, config, target, Reporter("prepare", quiet=True), evaluated=evaluated)


def store_of(model: Path, data: Path) -> RowStore:
    return RowStore(data, Verifier.of(open_checkpoint(model)))


def bytes_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "manifest.json"}


class Shuffled:
    """An engine that answers as ours does, and hands the answers on in another order, the first ones last."""

    def __init__(self, engine: LocalEngine) -> None:
        self.name, self._engine = "shuffled", engine
        self.given: dict[tuple[int, ...], tuple[int, ...]] = {}

    def start(self) -> None:
        self._engine.start()

    def answer(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        heard: list[tuple[int, Answer, torch.Tensor | None]] = []
        self._engine.answer(requests, lambda place, answer, states: heard.append((place, answer, states)))
        for place, answer, states in sorted(heard, key=lambda one: -one[0]):
            self.given[tuple(requests[place].prompt)] = answer.token_ids
            on_answer(place, answer, states)


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> list[Shuffled]:
    """Put a `Shuffled` around the engine of every run; the list gets them."""
    made: list[Shuffled] = []

    def wrap(*args: object, **kwargs: object) -> Shuffled:
        made.append(Shuffled(LocalEngine(*args, **kwargs)))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr("fastmtp.data.engines.choosing.LocalEngine", wrap)
    return made


def test_stored_rows_are_what_the_verifier_says(model: Path, data: Path) -> None:
    """Cases D4, T2: ids are those of greedy generation, states those after the final norm, row by row."""
    store = store_of(model, data)
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    assert len(store.entries) == 40
    assert len({entry.key for entry in store.entries}) == 40
    for entry in store.entries:
        ids, hidden, mask = store.row(entry)
        assert mask.tolist() == [False] * entry.prompt_length + [True] * (entry.length - entry.prompt_length)
        with torch.inference_mode():
            logits = verifier(input_ids=ids[None]).logits[0].float()
            fresh = verifier.base_model(input_ids=ids[None]).last_hidden_state[0]
        # Token by token and all at once, bf16 rounds otherwise, and may send a token to another expert.
        far = ~torch.isclose(hidden.float(), fresh.float(), atol=0.06, rtol=0.06)
        assert far.float().mean() < 0.01 and disagreement(hidden, fresh) < 0.02
        # Greedy: each stored token is the argmax, or within bf16's rounding of it.
        chosen = logits[entry.prompt_length - 1 : -1].gather(1, ids[entry.prompt_length :, None]).squeeze(1)
        assert (logits[entry.prompt_length - 1 : -1].max(-1).values - chosen).max() < 0.1


def test_rows_are_those_that_were_given_in_whatever_order(
    model: Path, prompts: Path, data: Path, tmp_path: Path, shuffled: list[Shuffled]
) -> None:
    """Case D4: the store lies in the order of the input, and does not depend on that of completion."""
    run_prepare(model, tmp_path / "d", prompts=str(prompts))
    (engine,) = shuffled
    store = store_of(model, tmp_path / "d")
    assert len(engine.given) == len(store.entries) == 40
    for entry in store.entries:
        ids = store.row(entry)[0].tolist()
        assert engine.given[tuple(ids[: entry.prompt_length])] == tuple(ids[entry.prompt_length :])
    assert bytes_in(tmp_path / "d") == bytes_in(data)


def test_sampled_answers_depend_on_their_row_alone(model: Path, prompts: Path, tmp_path: Path) -> None:
    """Neither the company that a prompt has in its batch, nor its place in the file, changes what is drawn."""
    sampling = SamplingConfig(temperature=1.0, top_k=20, top_p=0.95)
    reversed_file = tmp_path / "r.jsonl"
    reversed_file.write_text("\n".join(reversed(prompts.read_text().splitlines())) + "\n")
    found = []
    for name, changes in {
        "a": {"prompts": str(prompts)},
        "b": {"prompts": str(reversed_file), "batch_size": 3},
        "c": {"prompts": str(prompts), "seed": 1},
    }.items():
        run_prepare(model, tmp_path / name, sampling=sampling, **changes)
        store = store_of(model, tmp_path / name)
        found.append({entry.key: store.row(entry)[0].tolist() for entry in store.entries})
    assert len(found[0]) > 30  # random weights end some answers at once
    assert found[0].keys() == found[1].keys()
    # Sums in another order may move a draw, once in a while.
    assert sum(found[0][key] == found[1][key] for key in found[0]) >= 0.9 * len(found[0])
    assert sum(found[0][key] == found[2].get(key) for key in found[0]) < 5


def test_every_row_is_used_or_counted(data: Path) -> None:
    summary = read_manifest(data).summary
    assert summary["rows_in"] == 42
    assert summary["rejected"] == {"prompt too long": 1, "duplicate": 1}
    assert summary["rows"] + sum(summary["rejected"].values()) == summary["rows_in"]
    assert 0 < summary["rows_holdout"] < 20
    assert sum(summary["finish"].values()) == summary["rows"]


def test_split_and_choice_are_stable(model: Path, prompts: Path, data: Path, tmp_path: Path) -> None:
    """A conversation keeps its side when more data comes, and in any order."""
    lines = prompts.read_text().splitlines()
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(reversed(lines[:15])) + "\n")
    run_prepare(model, tmp_path / "d", prompts=str(fewer))
    known = {entry.key: entry.split for entry in store_of(model, data).entries}
    found = {entry.key: entry.split for entry in store_of(model, tmp_path / "d").entries}
    assert found.items() <= known.items()
    summary = run_prepare(model, tmp_path / "s", prompts=str(prompts), max_samples=10).summary
    assert summary["rows"] + sum(summary["rejected"].values()) == summary["rows_in"] == 42
    assert summary["rejected"]["not sampled"] == 31


def test_what_is_measured_is_not_trained_on(model: Path, prompts: Path, tmp_path: Path) -> None:
    summary = run_prepare(model, tmp_path / "d", prompts=str(prompts), evaluated=roots_of([str(prompts)], 7)).summary
    assert summary["rejected"]["in the evaluation set"] == 8  # one of the seven is there twice
    assert summary["rows"] == 33


def test_prompts_that_do_not_fit(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row is left to train on .41 prompt too long"):
        run_prepare(model, tmp_path / "d", prompts=str(prompts), max_length=8)
    assert not (tmp_path / "d").exists()


def test_lengths_of_prompts_are_a_choice(model: Path, prompts: Path, data: Path, tmp_path: Path) -> None:
    lengths = sorted(entry.prompt_length for entry in store_of(model, data).entries)
    low, high = lengths[5], lengths[-5]
    summary = run_prepare(
        model, tmp_path / "d", prompts=str(prompts), min_prompt_tokens=low, max_prompt_tokens=high
    ).summary  # fmt: skip
    assert summary["rows"] == sum(low <= length <= high for length in lengths)
    assert summary["rejected"]["prompt too short"] == sum(length < low for length in lengths)


def test_prompts_are_rendered_by_the_models_own_template(model: Path, data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    store = store_of(model, data)
    ids, _, _ = store.row(store.entries[0])
    text = tokenizer.decode(ids[: store.entries[0].prompt_length])
    assert text.replace(" ", "").startswith("<|im_start|>") and "assistant" in text.replace(" ", "")


def test_states_are_sized_before_anything_is_answered(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D4: tokens x hidden size x 2 bytes, against what is free."""
    tight = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _place: tight)
    monkeypatch.setattr(LocalEngine, "answer", lambda *_: pytest.fail("asked"))
    with pytest.raises(DataError, match=r"tokens x hidden size x 2 bytes.*1.0 kB free"):
        run_prepare(model, tmp_path / "d", prompts=str(prompts))


def test_states_of_other_rows_are_refused(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that mixes up its rows' states is found out by the comparison with a pass, before they are stored."""

    class Mixed(LocalEngine):
        def answer(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
            kept: list[torch.Tensor] = []

            def swap(place: int, answer: Answer, states: torch.Tensor | None) -> None:
                assert states is not None
                kept.append(states)
                on_answer(place, answer, kept[0][: len(states)] if len(kept[0]) >= len(states) else states.flip(0))

            super().answer(requests, swap)

    monkeypatch.setattr("fastmtp.data.engines.choosing.LocalEngine", Mixed)
    with pytest.raises(DataError, match="not those of a pass of this verifier"):
        run_prepare(model, tmp_path / "d", prompts=str(prompts), max_samples=12)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve conversations of two questions, with recorded answers."""
    file = tmp_path_factory.mktemp("chats") / "c.jsonl"
    lines = []
    for n in range(12):
        messages = [
            {"role": "user", "content": f"first {n}"}, {"role": "assistant", "content": f"recorded {n}"},
            {"role": "user", "content": f"second {n}"}, {"role": "assistant", "content": f"again {n} " + "x" * (n % 3)},
        ]  # fmt: skip
        lines.append({"messages": messages})
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def test_every_turn_is_answered_with_own_answers_as_history(model: Path, conversations: Path, tmp_path: Path) -> None:
    """What stands before the second question is what the verifier said to the first, not what was recorded."""
    summary = run_prepare(
        model, tmp_path / "d", prompts=str(conversations), turns="all", max_length=126, max_new_tokens=12
    ).summary  # fmt: skip
    store = store_of(model, tmp_path / "d")
    tokenizer = AutoTokenizer.from_pretrained(model)
    first = {entry.key: store.row(entry)[0] for entry in store.entries if entry.turn == 1}
    later = [entry for entry in store.entries if entry.turn == 3]
    left_out = summary["turns_left_out"].get("after an answer that was cut off", 0)
    assert len(first) == 12 and len(later) == 12 - left_out
    assert summary["conversations"] == 12 and summary["rows"] == 24 - left_out
    for entry in later:
        history = tokenizer.decode(store.row(entry)[0][: entry.prompt_length]).replace(" ", "")
        assert "recorded" not in history and "second" in history
        said = tokenizer.decode(first[entry.key]).replace(" ", "").rpartition("<|im_start|>")[2]
        assert said.removesuffix("<|im_end|>") in history


def test_kept_answers_come_with_a_warning_of_what_they_cost(
    model: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DATA.model_copy(
        update={"prompts": str(conversations), "responses": "keep", "turns": "all", "max_length": 126}
    )
    summary = prepare(model, config, tmp_path / "d", Reporter("prepare")).summary
    said = " ".join(capsys.readouterr().err.split())
    assert "responses: keep. The verifier itself would have said" in said
    assert 0 <= summary["own_share"] < 0.5  # random weights say none of it
    store = store_of(model, tmp_path / "d")
    tokenizer = AutoTokenizer.from_pretrained(model)
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    for entry in store.entries:
        ids, hidden, mask = store.row(entry)
        answers = tokenizer.decode(ids[mask]).replace(" ", "")
        assert answers.startswith("recorded") and "again" in answers and "first" not in answers
        with torch.inference_mode():
            fresh = verifier.base_model(input_ids=ids[None]).last_hidden_state[0]
        assert disagreement(hidden, fresh) < 0.02


class Killed(BaseException):
    """Stands for SIGKILL where a real one would end the test."""


def test_a_kill_while_answering_costs_only_what_was_not_answered(
    model: Path, prompts: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run asks only for the rest, and its result is the same to the byte in its tokens."""
    with monkeypatch.context() as patch:
        original = LocalEngine.answer

        def dying(self: LocalEngine, requests: Sequence[Request], on_answer: OnAnswer) -> None:
            left = [17]

            def hear(place: int, answer: Answer, states: torch.Tensor | None) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                on_answer(place, answer, states)

            original(self, requests, hear)

        patch.setattr(LocalEngine, "answer", dying)
        with pytest.raises(Killed):
            run_prepare(model, tmp_path / "d", prompts=str(prompts))
    journal = tmp_path / ".d.progress" / JOURNAL
    assert len(journal.read_text().splitlines()) == 1 + 17
    asked: list[int] = []
    ask = LocalEngine.answer

    def counted(self: LocalEngine, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        asked.append(len(requests))
        ask(self, requests, on_answer)

    monkeypatch.setattr(LocalEngine, "answer", counted)
    summary = run_prepare(model, tmp_path / "d", prompts=str(prompts)).summary
    assert asked == [40 - 17] and summary["rows_answered"] == 23
    assert not journal.parent.exists()
    here, there = store_of(model, tmp_path / "d"), store_of(model, data)
    assert [entry.key for entry in here.entries] == [entry.key for entry in there.entries]
    for one, other in zip(here.entries, there.entries, strict=True):
        assert here.row(one)[0].tolist() == there.row(other)[0].tolist()


def test_a_changed_sampling_begins_anew(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastmtp.data.prepare.RowWriter", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run_prepare(model, tmp_path / "d", prompts=str(prompts))
    summary = run_prepare(model, tmp_path / "d", prompts=str(prompts), max_new_tokens=20).summary
    assert summary["rows_answered"] == 40


def test_kill_dash_nine_while_storing_leaves_finished_shards_alone(model: Path, prompts: Path, tmp_path: Path) -> None:
    """A real SIGKILL between two shards: what was finished is linked into the result and not written again."""
    target = tmp_path / "d"
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fastmtp.data import shards, store\n"
        "from tests.fastmtp.data.test_prepare import run_prepare\n"
        "store.RowWriter.__init__.__kwdefaults__['shard_tokens'] = 600\n"
        "finish, left = shards.ShardFile.finish, [int(sys.argv[4])]\n"
        "def dying(self):\n"
        "    finish(self)\n"
        "    left[0] -= 1\n"
        "    if left[0] == 0:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "shards.ShardFile.finish = dying\n"
        "run_prepare(Path(sys.argv[1]), Path(sys.argv[2]), prompts=sys.argv[3])\n"
    )
    arguments = [sys.executable, "-c", program, str(model), str(target), str(prompts)]
    killed = subprocess.run([*arguments, "2"], capture_output=True, text=True, env=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    shards = tmp_path / ".d.progress" / "rows"
    before = {path.name: path.stat() for path in shards.iterdir() if path.suffix == ".safetensors"}
    assert len(before) == 2 and not target.exists()
    time.sleep(0.01)
    again = subprocess.run([*arguments, "-1"], capture_output=True, text=True, env=os.environ)
    assert again.returncode == 0, again.stderr
    assert read_manifest(target).summary["rows_answered"] == 0
    for name, stat in before.items():
        after = (target / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert len(store_of(model, target).entries) == 40
    assert not shards.exists()


def test_the_writer_refuses_states_of_other_ids(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D4: ids beside the states are compared when they are put down."""
    put = stage.RowWriter.put
    monkeypatch.setattr(
        stage.RowWriter, "put", lambda self, place, ids, states: put(self, place, [*ids[:-1], ids[-1] + 1], states)
    )
    with pytest.raises(IntegrityError, match="other tokens"):
        run_prepare(model, tmp_path / "d", prompts=str(prompts), max_samples=12)
