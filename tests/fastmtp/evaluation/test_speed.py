"""Speed: what is run in which order, and what is made of it. vLLM's own client is run in the test under vLLM."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastmtp import procs
from fastmtp.config import SpeedConfig
from fastmtp.errors import ServingError
from fastmtp.evaluation.report import Arm
from fastmtp.evaluation.speed import Arms, figures, measure_speed, speedups
from fastmtp.progress import Reporter
from fastmtp.serving import Server
from tests.fastmtp.evaluation import example


class Client:
    """In the place of vLLM's client: it writes what that would, and keeps what was asked."""

    def __init__(self, completed: int = 4) -> None:
        self.asked: list[str] = []
        self._completed = completed

    def __call__(self, argv: list[str], *, log: Path) -> int:
        log.touch()
        for words in json.loads(Path(argv[3]).read_text()):
            options = dict(zip(words, words[1:], strict=False))
            name = options["--result-filename"]
            self.asked.append(name.removesuffix(".json"))
            found = {
                "completed": self._completed, "total_output_tokens": 12, "duration": 2.0, "output_throughput": 50.0,
                "itls": [[0.001, 0.003], [0.002]], "ttfts": [0.010, 0.020], "latencies": [0.014, 0.022],
                "output_lens": [9, 2],
            }  # fmt: skip
            (Path(options["--result-dir"]) / name).write_text(json.dumps(found))
        return 0


class Servers:
    """Counts which run."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.starts: list[str] = []
        self.most = 0

    def arms(self) -> Arms:
        names: tuple[Arm, ...] = ("none", "base", "tuned")
        return {name: lambda name=name: self._serve(name) for name in names}  # type: ignore[misc]

    @contextlib.contextmanager
    def _serve(self, name: str) -> Iterator[Server]:
        self.starts.append(name)
        self.running.append(name)
        self.most = max(self.most, len(self.running))
        yield Server(f"http://{name}", "checkpoint")
        self.running.remove(name)


@pytest.mark.parametrize("together", [True, False])
def test_arms_take_turns(together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, servers = Client(), Servers()
    monkeypatch.setattr(procs, "run", client)
    config = SpeedConfig(concurrencies=(1, 8), num_prompts=4, rounds=2)
    report = measure_speed(
        servers.arms(), "p", [[1, 2], [3]], config, max_tokens=16, temperature=0.0, num_speculative_tokens=3,
        together=together, directory=tmp_path, reporter=Reporter("evaluate", quiet=True),
    )  # fmt: skip
    assert servers.running == [] and servers.most == (3 if together else 1)
    assert len(servers.starts) == (3 if together else 6)
    first = ["none-1-0", "base-1-0", "tuned-1-0", "none-8-0"] if together else ["none-1-0", "none-8-0", "base-1-0"]
    assert client.asked[: len(first)] == first
    # Another begins the second round.
    assert client.asked[6] == "base-1-1"
    assert len(report.runs) == 12 and {up.ratio.value for up in report.speedups} == {1.0}
    run = report.runs[0]
    assert (run.itl_median_ms, run.itl_p95_ms, run.ttft_median_ms) == pytest.approx((2.0, 2.9, 15.0))
    assert run.tpot_median_ms == pytest.approx((0.5 + 2.0) / 2)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert prompts == [[1, 2], [3], [1, 2], [3]]


def test_requests_that_fail_are_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procs, "run", Client(completed=3))
    with pytest.raises(ServingError, match="answered 3 of 4 requests"):
        measure_speed(
            Servers().arms(), "p", [[1]], SpeedConfig(num_prompts=4), max_tokens=16, temperature=0.0,
            num_speculative_tokens=3, together=True, directory=tmp_path, reporter=Reporter("evaluate", quiet=True),
        )  # fmt: skip


def test_medians_count_and_ratios_are_of_one_round() -> None:
    runs = [
        run.model_copy(update={"output_tokens_per_second": rate, "arm": arm, "round": number, "concurrency": 1})
        for number, (none, tuned) in enumerate([(100.0, 150.0), (50.0, 100.0), (100.0, 170.0)])
        for arm, rate, run in (("none", none, example.speed().runs[0]), ("tuned", tuned, example.speed().runs[0]))
    ]
    of = {one.arm: one.output_tokens_per_second for one in figures(runs)}
    assert (of["none"].value, of["tuned"].value, of["tuned"].low, of["tuned"].high) == (100, 150, 100, 170)
    (found,) = speedups(runs)
    assert (found.arm, found.over, found.ratio.value) == ("tuned", "none", 1.7)
    assert (found.ratio.low, found.ratio.high) == (1.5, 2.0)
