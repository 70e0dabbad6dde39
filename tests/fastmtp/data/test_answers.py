"""The journal of answers, and what identifies a row before it is answered."""

from __future__ import annotations

from pathlib import Path

from fastmtp.data.answers import JOURNAL, Journal, row_id, seed_of
from fastmtp.servers.client import Answer


def test_a_journal_goes_on_where_it_was_left(tmp_path: Path) -> None:
    with Journal(tmp_path, "one") as journal:
        assert not journal.resumed
        journal.add("a", Answer((1, 2, 3), "stop"))
        journal.add("b", Answer((4,), "length"))
    with Journal(tmp_path, "one") as journal:
        assert journal.resumed
        assert journal.known == {"a": Answer((1, 2, 3), "stop"), "b": Answer((4,), "length")}
        journal.add("c", Answer((5,), "stop"))
    with Journal(tmp_path, "one") as journal:
        assert list(journal.known) == ["a", "b", "c"]


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    with Journal(tmp_path, "one") as journal:
        journal.add("a", Answer((1, 2, 3), "stop"))
        journal.add("b", Answer((4, 5, 6), "stop"))
    file = tmp_path / JOURNAL
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with Journal(tmp_path, "one") as journal:
            assert set(journal.known) <= {"a", "b"}
            journal.add("c", Answer((7,), "stop"))
            before = set(journal.known)
        with Journal(tmp_path, "one") as journal:
            assert set(journal.known) == before, size


def test_a_hole_in_the_middle_ends_what_is_believed(tmp_path: Path) -> None:
    with Journal(tmp_path, "one") as journal:
        for name in "abc":
            journal.add(name, Answer((1, 2, 3), "stop"))
    file = tmp_path / JOURNAL
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * (len(lines[2]) - 1) + b"\n"
    file.write_bytes(b"".join(lines))
    with Journal(tmp_path, "one") as journal:
        assert list(journal.known) == ["a"]


def test_another_identity_begins_anew(tmp_path: Path) -> None:
    with Journal(tmp_path, "one") as journal:
        journal.add("a", Answer((1,), "stop"))
    with Journal(tmp_path, "two") as journal:
        assert not journal.resumed and journal.known == {}
    with Journal(tmp_path, "one") as journal:
        assert journal.known == {}


def test_a_row_is_its_dialogue_its_turn_and_its_tokens() -> None:
    rows = {row_id("a", 1, [1, 2]), row_id("b", 1, [1, 2]), row_id("a", 3, [1, 2]), row_id("a", 1, [1, 3])}
    assert len(rows) == 4
    assert row_id("a", 1, (1, 2)) in rows
    seeds = {seed_of(seed, row) for seed in (0, 1) for row in rows}
    assert len(seeds) == 8 and all(0 <= seed < 2**31 for seed in seeds)
