"""The walk and the table, on figures worked out by hand."""

from __future__ import annotations

from fastmtp.acceptance import Walk, measurement
from fastmtp.protocol import Measurement
from fastmtp.table import acceptance_table
from fastmtp.train import step_weights

Y, N = True, False


def test_walk_lands_where_decoding_lands() -> None:
    # Tokens 0..9, prompt 0..2. Origin 2 accepts 2 (drafts of 4 and 5), next origin 5 accepts 0, 6 accepts 1, 8 ends.
    hits = [[N, N, N]] * 10
    hits[2], hits[5], hits[6] = [Y, Y, N], [N, Y, Y], [Y, N, Y]
    hits[3] = hits[4] = hits[7] = [Y, Y, Y]  # never landed on
    walk = Walk(3)
    walk.add(hits, first=2, length=10)
    found = walk.measurement()
    assert found.drafts == 3
    assert walk.accepted == [2, 1, 0]
    assert found.mean_acceptance_length == 2.0


def test_walk_ends_with_the_last_token() -> None:
    walk = Walk(3)
    walk.add([[N, N, N]] * 4, first=0, length=4)
    assert walk.drafts == 2  # origins 0 and 1; from 2 on the last token is known


def test_nothing_drafted_is_no_rate() -> None:
    assert measurement(0, [0, 0]) == Measurement(acceptance=[0, 0], mean_acceptance_length=1.0, drafts=0)


def test_step_weights_are_fastmtps() -> None:
    assert [round(weight, 4) for weight in step_weights(3, 0.6)] == [0.5102, 0.3061, 0.1837]


def figure(length: float, drafts: int = 5000) -> Measurement:
    return Measurement(acceptance=[(length - 1) / 2] * 2, mean_acceptance_length=length, drafts=drafts)


def test_table_shows_the_gain() -> None:
    table = acceptance_table({"base": figure(2.0), "tuned": figure(2.5)})
    assert table.splitlines()[-1] == "| gain | +0.250 | +0.250 | +0.500 |  |"
