"""Rows on disk: which states belong to which tokens, what a second run touches, and what is refused."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastmtp.data.shards import Verifier, bytes_of
from fastmtp.data.store import INDEX, RowEntry, RowStore, RowWriter, require_room
from fastmtp.errors import DataError, IntegrityError

HIDDEN = 6
VERIFIER = Verifier("abc", layers=2, hidden_size=HIDDEN)
LENGTHS = [7, 3, 12, 5, 9, 4, 11, 6, 13, 8, 10, 14]


def entries(lengths: list[int] = LENGTHS) -> list[tuple[RowEntry, list[int]]]:
    """Rows of distinct lengths; 10 comes after 2 in text order. The ids tell row and place."""
    return [
        (RowEntry(f"row-{number}", "train", length, 2, "stop"), [100 * number + place for place in range(length)])
        for number, length in enumerate(lengths)
    ]


def states(ids: list[int]) -> Tensor:
    """States that bf16 holds exactly, which tell the token."""
    found = torch.tensor(ids).float()[:, None]
    return torch.cat([(found // 100).expand(-1, HIDDEN // 2), (found % 100).expand(-1, HIDDEN // 2)], 1)


def write(directory: Path, order: list[int] | None = None, rows: list[tuple[RowEntry, list[int]]] | None = None) -> int:
    """Write rows in an order of completion. Returns how many were wanted."""
    directory.mkdir(exist_ok=True)
    rows = rows or entries()
    with RowWriter(directory, VERIFIER, rows, shard_tokens=30) as writer:
        wanted = writer.missing()
        for index in order or wanted:
            writer.put(index, rows[index][1], states(rows[index][1]))
        writer.close()
    return len(wanted)


def stamps(directory: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_rows_come_back_in_the_order_of_the_input(tmp_path: Path) -> None:
    """Case D4: twelve rows of distinct lengths, completed in any order: row i holds the ids and states of row i."""
    order = list(range(len(LENGTHS)))
    random.Random(1).shuffle(order)
    write(tmp_path / "a", order)
    write(tmp_path / "b")
    store = RowStore(tmp_path / "a", VERIFIER)
    assert [entry.key for entry in store.entries] == [f"row-{number}" for number in range(len(LENGTHS))]
    for entry, (_, ids) in zip(store.entries, entries(), strict=True):
        found, hidden, mask = store.row(entry)
        assert found.tolist() == ids and mask.tolist() == [False] * 2 + [True] * (len(ids) - 2)
        assert hidden.dtype == torch.bfloat16 and torch.equal(hidden.float(), states(ids))
        assert store.answer_ids(entry) == ids[2:]
    assert len({entry.shard for entry in store.entries}) > 2
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_shard_says_what_it_holds(tmp_path: Path) -> None:
    """Case T2; and any reader of safetensors reads it."""
    write(tmp_path / "d")
    path = tmp_path / "d" / "rows-00000.safetensors"
    assert VERIFIER.metadata().items() >= {"post_final_norm": "yes", "layer": "2", "verifier": "abc"}.items()
    tensors = load_file(path)
    assert {key: (value.dtype, value.shape[0]) for key, value in tensors.items()} == {
        "input_ids": (torch.int32, 36), "hidden_states": (torch.bfloat16, 36), "loss_mask": (torch.uint8, 36),
    }  # fmt: skip


def test_a_second_run_touches_no_finished_file(tmp_path: Path) -> None:
    """Case D4."""
    assert write(tmp_path / "d") == len(LENGTHS)
    before = stamps(tmp_path / "d")
    assert write(tmp_path / "d") == 0
    assert stamps(tmp_path / "d") == before


def test_a_killed_run_goes_on_by_shard(tmp_path: Path) -> None:
    """Half of the second shard was there: the first is kept as it is, the second is made again."""
    rows = entries()
    with RowWriter(tmp_path, VERIFIER, rows, shard_tokens=30) as writer:
        first, second, *_ = writer.shards()
        for index in first + second[:1]:
            writer.put(index, rows[index][1], states(rows[index][1]))
        with pytest.raises(IntegrityError, match=f"row {second[0] + 1} first"):
            writer.close()
    kept = stamps(tmp_path)["rows-00000.safetensors"]
    assert write(tmp_path) == len(rows) - len(first)
    assert stamps(tmp_path)["rows-00000.safetensors"] == kept
    write(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.glob("*.*")) == sorted(stamps(tmp_path / "whole"))
    for name in stamps(tmp_path / "whole"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_shard_of_other_rows_is_made_again(tmp_path: Path) -> None:
    """Another answer, another mask, another verifier, a torn file."""
    write(tmp_path)
    rows = entries()
    (tmp_path / ".rows-00007.safetensors.partial").write_bytes(b"a run was killed that had more rows")
    changed = rows[0][0], [*rows[0][1][:-1], 1]
    masked = dataclasses.replace(rows[0][0], prompt_length=3), rows[0][1]
    for row in (changed, masked):
        with RowWriter(tmp_path, VERIFIER, [row, *rows[1:]], shard_tokens=30) as writer:
            assert writer.shards()[0][0] == 0 and len(writer.shards()) == 1
    other = dataclasses.replace(VERIFIER, fingerprint="def")
    with RowWriter(tmp_path, other, rows, shard_tokens=30) as writer:
        assert len(writer.missing()) == len(rows)
    torn = tmp_path / "rows-00000.safetensors"
    torn.write_bytes(torn.read_bytes()[:-10])
    with RowWriter(tmp_path, VERIFIER, rows, shard_tokens=30) as writer:
        assert len(writer.shards()) == 1
    write(tmp_path, rows=rows[:6])
    assert sorted(stamps(tmp_path)) == ["rows-00000.safetensors", "rows-00001.safetensors", INDEX]


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    """Case D4: an answer that came for another request; too few states; no number."""
    rows = entries()
    with RowWriter(tmp_path, VERIFIER, rows) as writer:
        with pytest.raises(IntegrityError, match="row 0 .row-0. are of other tokens"):
            writer.put(0, rows[1][1], states(rows[1][1]))
        with pytest.raises(IntegrityError, match="of other tokens"):
            writer.put(0, rows[0][1], states(rows[0][1])[1:])
        with pytest.raises(IntegrityError, match="not finite"):
            writer.put(0, rows[0][1], states(rows[0][1]) / 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "def"}, "another verifier .verifier: abc, not def"),
        ({"layers": 3}, "another layer .layer: 2, not 3"),
        ({"hidden_size": 8}, "another size .hidden_size: 6, not 8"),
    ],
)
def test_states_of_another_verifier_refuse_to_be_read(tmp_path: Path, change: dict[str, object], said: str) -> None:
    """Case T2: the message names what differs."""
    write(tmp_path)
    with pytest.raises(DataError, match=said):
        RowStore(tmp_path, dataclasses.replace(VERIFIER, **change))  # type: ignore[arg-type]


def test_states_from_before_the_norm_refuse_to_be_read(tmp_path: Path) -> None:
    write(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(b'"post_final_norm":"yes"', b'"post_final_norm":"no" '))
    with pytest.raises(DataError, match=r"other than after the final norm \(post_final_norm: no, not yes\)"):
        RowStore(tmp_path, VERIFIER)


def test_ids_that_are_not_the_rows_are_found(tmp_path: Path) -> None:
    """Case D4: two shards of equal shape, exchanged."""
    write(tmp_path, rows=entries([15, 15, 15, 15]))
    names = [tmp_path / f"rows-0000{number}.safetensors" for number in range(2)]
    shutil.move(names[0], tmp_path / "aside")
    shutil.move(names[1], names[0])
    shutil.move(tmp_path / "aside", names[1])
    store = RowStore(tmp_path, VERIFIER)
    with pytest.raises(IntegrityError, match="rows-00000.safetensors does not hold the tokens of row row-0"):
        store.row(store.entries[0])


def test_several_answers_in_a_row(tmp_path: Path) -> None:
    row = RowEntry("k", "train", 8, 2, "stop", spans=((2, 4), (6, 8)), root="r", turn=3)
    write(tmp_path, rows=[(row, list(range(8)))])
    store = RowStore(tmp_path, VERIFIER)
    (entry,) = store.entries
    assert (entry.supervised, entry.answers, entry.root, entry.turn) == (4, ((2, 4), (6, 8)), "r", 3)
    assert store.row(entry)[2].tolist() == [False, False, True, True] * 2
    assert store.answer_ids(entry) == [2, 3, 6, 7]


def test_an_index_that_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not read"):
        RowStore(tmp_path, VERIFIER)
    (tmp_path / INDEX).write_text('{"key": "a"}\n')
    with pytest.raises(DataError, match="does not read"):
        RowStore(tmp_path, VERIFIER)


def test_masks_of_nothing_or_everything_are_refused(tmp_path: Path) -> None:
    """Case D1."""
    for prompt, said in ((5, "No token is supervised"), (0, "All 5 tokens are supervised")):
        with pytest.raises(DataError, match=said):
            RowWriter(tmp_path, VERIFIER, [(RowEntry("a", "train", 5, prompt, "stop"), [1] * 5)])


def test_states_that_do_not_fit_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D4: tokens x hidden size x 2 bytes, and a little for ids and mask."""
    assert bytes_of(1000, 2048) == 1000 * 2048 * 2 + 5000
    tokens = sum(LENGTHS)
    usage = shutil.disk_usage(tmp_path)._replace(free=bytes_of(tokens, HIDDEN))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    require_room(tmp_path, tokens, HIDDEN)
    with pytest.raises(DataError, match="take 1.8 kB .tokens x hidden size x 2 bytes."):
        require_room(tmp_path, tokens + 1, HIDDEN)
