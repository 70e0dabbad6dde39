"""Under a real vLLM: heads that are broken or no better, servers that do not start or die, and what is left running.

One server of the verifier as it came serves every evaluation here, by its URL; it starts once, on its second port, and
the last test kills it while it answers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastmtp import procs
from fastmtp.checkpoint import INDEX
from fastmtp.config import EvaluateConfig, GateConfig, SamplingConfig
from fastmtp.errors import ServingError
from fastmtp.evaluate import evaluate
from fastmtp.evaluation.report import EvaluationReport
from fastmtp.extract import extract
from fastmtp.inspection import inspect
from fastmtp.progress import Reporter
from fastmtp.serving import Launch, Request, Server, connect, serve
from fastmtp.stitch import stitch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

K = 3
PROMPTS = 24
ROOM = 256
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


_OURS = "FASTMTP_TEST_PROCESS"  # whatever else serves on this machine is not looked at


@pytest.fixture(scope="module", autouse=True)
def marked() -> Iterator[None]:
    """All that this module starts carries a mark of its own."""
    os.environ[_OURS] = str(os.getpid())
    yield
    del os.environ[_OURS]


def running() -> set[int]:
    """Processes of vLLM that were started here, by the mark that they carry."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(_OURS) == str(os.getpid()) and "vllm" in " ".join(process.cmdline()).lower():
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def base(half_trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the verifier, which begins on a port that somebody has."""
    free, given = procs.free_port, list[int]()
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def port() -> int:
            given.append(free() if given else int(taken.getsockname()[1]))
            return given[-1]

        patch.setattr(procs, "free_port", port)
        launch = Launch(checkpoint=half_trained, max_model_len=ROOM, num_speculative_tokens=K)
        with serve(launch, tmp_path_factory.mktemp("base") / "vllm.log") as server:
            assert len(given) == 2 and server.url.endswith(f":{given[1]}")
            yield server


def config(verifier: Path, **other: object) -> EvaluateConfig:
    return EvaluateConfig.model_validate(
        {
            "prompts": str(verifier / "prompts-test.jsonl"), "num_prompts": PROMPTS, "max_tokens": 64,
            "num_speculative_tokens": K, "reference": False, **other,
        }
    )  # fmt: skip


def changed(verifier: Path, target: Path, change: Change) -> Path:
    """A copy of a checkpoint with another head."""
    shutil.copytree(verifier, target)
    names = set(json.loads((target / INDEX).read_text())["weight_map"].values())
    files = {name: load_file(target / name) for name in names}
    head = {key: tensor for found in files.values() for key, tensor in found.items() if key.startswith("mtp.")}
    other = head | change(head)
    for name, found in files.items():
        save_file({key: other.get(key, tensor) for key, tensor in found.items()}, target / name, {"format": "pt"})
    return target


def evaluated(verifier: Path, base: Server, tuned: Server, checkpoint: Path, out: Path) -> EvaluationReport:
    """The report of an evaluation by URLs."""
    urls = {"base": base.url, "tuned": tuned.url}
    heads: dict[Any, Path] = {"base": verifier, "tuned": checkpoint}
    gate = GateConfig(min_drafts=100)
    with Reporter("evaluate", quiet=True) as reporter:
        evaluate(heads, config(verifier), gate, out, reporter, urls=urls)
    return EvaluationReport.model_validate_json((out / "report.json").read_bytes())


def served(verifier: Path, base: Server, checkpoint: Path, place: Path) -> EvaluationReport:
    """The report of an evaluation of a checkpoint on a server of its own.

    That server is left after its first process was killed: its engine, which is in no group of ours, must end as well.
    """
    before = running()
    launch = Launch(checkpoint=checkpoint, max_model_len=ROOM, num_speculative_tokens=K)
    with serve(launch, place / "vllm.log") as tuned:
        report = evaluated(verifier, base, tuned, checkpoint, place / "evaluation")
        port = tuned.url.rpartition(":")[2]
        (first,) = (one for pid in running() - before if port in (one := psutil.Process(pid)).cmdline())
        first.kill()
    assert running() <= before
    return report


def test_what_runs_is_read_back(base: Server) -> None:
    assert base.effective == ("0.32.0", "mtp", K, False)
    assert base.left_out() == [] and base.start_seconds > 1
    assert connect(base.url).effective == ("0.32.0", None, K, None)


def test_a_server_with_another_k_is_refused(half_trained: Path, base: Server, tmp_path: Path) -> None:
    urls = {"base": base.url, "tuned": base.url}
    heads: dict[Any, Path] = {"base": half_trained, "tuned": half_trained}
    other = config(half_trained, num_speculative_tokens=2)
    with pytest.raises(ServingError, match=r"drafts 3 tokens per step; 2 are asked of base"):
        evaluate(heads, other, GateConfig(), tmp_path / "e", Reporter("evaluate", quiet=True), urls=urls)
    assert not (tmp_path / "e").exists()


def test_the_verifier_against_itself_gains_nothing(half_trained: Path, base: Server, tmp_path: Path) -> None:
    found = evaluated(half_trained, base, base, half_trained, tmp_path / "evaluation")
    one, other = found.acceptance
    assert one.mean_acceptance_length.value > 1.2 and one.per_request and one.drafts > 100
    assert one.rates[0].low is not None and one.rates[0].low < one.rates[0].value
    assert other.mean_acceptance_length.value == pytest.approx(one.mean_acceptance_length.value, abs=0.01)
    assert found.gate.verdict == "no gain" and not found.gate.passed
    assert [run.url for run in found.servers] == [base.url, base.url]
    assert any("no --plain-url" in warning for warning in found.warnings)


def test_a_head_of_zeros_is_recognised(half_trained: Path, base: Server, tmp_path: Path) -> None:
    """Case V1: the server is healthy and its answers are right."""
    zeros = changed(half_trained, tmp_path / "m", lambda head: {key: torch.zeros_like(head[key]) for key in head})
    found = served(half_trained, base, zeros, tmp_path)
    assert found.gate.verdict == "head not loaded or useless"
    assert found.gate.reason.startswith("head not loaded or useless: vLLM accepts 0.0")
    assert any("tuned" in warning and "not loaded, or is useless" in warning for warning in found.warnings)


def test_a_head_whose_tensors_were_swapped_fails(half_trained: Path, base: Server, tmp_path: Path) -> None:
    """Columns of the input projection the wrong way round, and the two norms before it: a mis-read convention."""

    def swap(head: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embedding, hidden = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"
        one, other = head["mtp.fc.weight"].chunk(2, dim=1)
        fc = torch.cat([other, one], dim=1).contiguous()
        return {embedding: head[hidden], hidden: head[embedding], "mtp.fc.weight": fc}

    found = served(half_trained, base, changed(half_trained, tmp_path / "m", swap), tmp_path)
    assert not found.gate.passed and found.gate.verdict in ("head not loaded or useless", "no gain")
    gain = found.gains[0].mean_acceptance_length
    assert gain.high is not None and gain.high < -0.1


def test_a_head_put_back_unchanged_is_served_as_before(half_trained: Path, base: Server, tmp_path: Path) -> None:
    """From a copy whose head lies in a file that the index does not list: mended, vLLM drafts as from the original."""
    hidden = Path(shutil.copytree(half_trained, tmp_path / "hidden"))
    index = json.loads((hidden / INDEX).read_text())
    tensors = {name: load_file(hidden / name) for name in set(index["weight_map"].values())}
    head = {key: value for found in tensors.values() for key, value in found.items() if key.startswith("mtp.")}
    for name, found in tensors.items():
        save_file({key: value for key, value in found.items() if key not in head}, hidden / name, {"format": "pt"})
    save_file(head, hidden / "mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] = {key: name for key, name in index["weight_map"].items() if key not in head}
    (hidden / INDEX).write_text(json.dumps(index))
    assert [fault.code for fault in inspect(hidden).faults if fault.level == "serving"] == ["head_unlisted"]
    quiet = Reporter("stitch", quiet=True)
    extract(hidden, tmp_path / "head", quiet)
    stitch(hidden, tmp_path / "head", tmp_path / "mended", quiet, mend=True)
    report = served(half_trained, base, tmp_path / "mended", tmp_path)
    one, same = report.acceptance
    # Two runs of vLLM may count a few drafts differently.
    assert same.drafts == pytest.approx(one.drafts, rel=0.02)
    assert [rate.value for rate in same.rates] == pytest.approx([rate.value for rate in one.rates], abs=0.02)


def test_the_same_prompts_twice_get_the_same_answers(half_trained: Path, base: Server) -> None:
    """Case V2: two prompts that begin alike, twice; state reused from the wrong one would show."""
    alike = [[5, 6, 7, 8] * 12, [*[5, 6, 7, 8] * 12, 9]]
    requests = [Request(ids, 32) for ids in alike]
    first, second = (base.generate(requests, SamplingConfig(), 2) for _ in range(2))
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]


def test_a_model_that_does_not_fit(half_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = running()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")
    launch = Launch(checkpoint=half_trained, max_model_len=ROOM)
    with (
        pytest.raises(ServingError, match=r"vLLM did not start.*The model does not fit"),
        serve(launch, tmp_path / "l"),
    ):
        pass
    assert running() <= before


def test_a_bad_flag_is_named(half_trained: Path, tmp_path: Path) -> None:
    before = running()
    launch = Launch(checkpoint=half_trained, max_model_len=64, server_args=("--max-num-batched-tokens", "1"))
    with (
        pytest.raises(ServingError, match=r"vLLM did not start.*max_num_batched_tokens"),
        serve(launch, tmp_path / "l"),
    ):
        pass
    assert running() <= before


def test_a_server_that_dies_while_it_answers(base: Server) -> None:
    """The engine is killed in the middle: a clear error within seconds, and what is left of the server comes down."""
    engine = [pid for pid in running() if "EngineCore" in " ".join(psutil.Process(pid).cmdline())]
    assert len(engine) == 1
    died: list[float] = []

    def kill() -> None:
        died.append(time.monotonic())
        psutil.Process(engine[0]).kill()

    timer = threading.Timer(2.0, kill)
    timer.start()
    try:
        requests = [Request([5, 6, 7, place % 50], 200) for place in range(400)]
        with pytest.raises(ServingError, match=r"vLLM (failed while it answered|stopped answering)"):
            base.generate(requests, SamplingConfig(temperature=1.0), 32)
        assert time.monotonic() - died[0] < 30
    finally:
        timer.join()
    with pytest.raises(ServingError):
        base.generate(requests[:1], SamplingConfig(), 1)
