"""When a firing of a schedule comes too late to be worth running."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import CreatedBy, FlowRun

from flows.retrain import missed_by_too_much

SCHEDULE = UUID(int=1)
SLOT = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Planned:
    """Stands in for Prefect's client: the runs that the server has planned."""

    def __init__(self, *runs: FlowRun) -> None:
        self._runs = list(runs)

    def read_flow_runs(self, **_: Any) -> list[FlowRun]:
        return self._runs


def firing(slot: datetime, schedule: UUID | None = SCHEDULE) -> FlowRun:
    made_by = None if schedule is None else CreatedBy(id=schedule, type="SCHEDULE", display_value="nightly")
    return FlowRun(
        id=uuid4(), flow_id=uuid4(), deployment_id=uuid4(), name="run", expected_start_time=slot, created_by=made_by
    )


@pytest.mark.parametrize(("late", "skipped"), [(0, False), (29, False), (31, True), (600, True)])
def test_a_firing_is_skipped_once_the_next_slot_is_nearer(late, skipped):
    planned = Planned(firing(SLOT + HOUR), firing(SLOT + 2 * HOUR))
    reason = missed_by_too_much(planned, firing(SLOT), SLOT + timedelta(minutes=late))
    assert bool(reason) is skipped
    if reason:
        assert reason.startswith("Skipped: the slot of 2026-11-30 12:00 UTC was missed by")


def test_a_slow_start_is_no_miss_however_short_the_period():
    planned = Planned(firing(SLOT + timedelta(minutes=1)))
    assert missed_by_too_much(planned, firing(SLOT), SLOT + timedelta(seconds=110)) is None
    assert missed_by_too_much(planned, firing(SLOT), SLOT + timedelta(seconds=130)) is not None


def test_slots_of_other_schedules_do_not_count():
    planned = Planned(firing(SLOT + timedelta(minutes=1), UUID(int=2)), firing(SLOT + HOUR))
    assert missed_by_too_much(planned, firing(SLOT), SLOT + timedelta(minutes=20)) is None


def test_a_run_that_no_schedule_made_is_never_too_late():
    planned = Planned(firing(SLOT + HOUR))
    assert missed_by_too_much(planned, firing(SLOT, None), SLOT + timedelta(days=3)) is None


def test_the_last_slot_of_a_schedule_is_never_too_late():
    assert missed_by_too_much(Planned(), firing(SLOT), SLOT + timedelta(days=3)) is None
