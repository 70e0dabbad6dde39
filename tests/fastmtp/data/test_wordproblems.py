"""The generated problems."""

from __future__ import annotations

from fastmtp.data.wordproblems import generate


def test_generated_problems_are_right_and_repeatable() -> None:
    rows = generate(200, 3)
    assert rows == generate(200, 3) != generate(200, 4)
    assert len({row["question"] for row in rows}) == 200
    for row in rows:
        for shown in row["answer"].split("<<")[1:]:
            formula, _, rest = shown.partition("=")
            assert eval(formula.replace("/", "//")) == int(rest.split(">>")[0])  # our own digits
        assert row["answer"].splitlines()[-2].split(" has ")[1].split()[0] == row["answer"].rsplit("#### ", 1)[1]
