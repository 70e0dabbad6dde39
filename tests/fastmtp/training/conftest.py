"""The job that these tests train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fastmtp.training.small import Job


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    # Imported here: torch must not be loaded before the suite has said how its threads wait.
    from tests.fastmtp.training.small import make_job

    return make_job(tmp_path_factory.mktemp("training"))
