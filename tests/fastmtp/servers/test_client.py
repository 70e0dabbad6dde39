"""Asking a server, on one of our own that answers as vLLM does: what is sent, what comes back, and how failures end."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fastmtp.config import SamplingConfig
from fastmtp.errors import InputError, ServingError
from fastmtp.servers.client import Answer, Counters, Request, Server
from fastmtp.serving import connect

METRICS = """# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="checkpoint"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="checkpoint"} 50.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="checkpoint"} 1.7e+09
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 30.0
"""


class Fake:
    """What the server answers, and what it was sent."""

    def __init__(self) -> None:
        self.metrics = METRICS
        self.sent: list[dict[str, Any]] = []
        self.status = 200
        self.histogram: list[int] | None = [1, 2, 3]
        self.hang = threading.Event()
        self.hang.set()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        metrics = {"speculative_decoding": {"acceptance_histogram": self.histogram}} if self.histogram else None
        choice = {"token_ids": body["prompt"][:1] * 2, "finish_reason": "length"}
        if "logprobs" in body:
            choice["logprobs"] = {"top_logprobs": [{"token_id:7": -0.5, "token_id:8": -0.75, "token_id:9": -3.0}]}
        return {"choices": [choice], "metrics": metrics}


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name http.server calls
            pages = {
                "/metrics": fake.metrics, "/version": '{"version": "0.32.0"}',
                "/v1/models": '{"data": [{"id": "mine", "root": "/m"}]}',
            }  # fmt: skip
            self._reply(200 if self.path in pages else 404, pages.get(self.path, "{}"))

        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.sent.append(body)
            if body["prompt"] == [999]:  # this one alone fails at once
                self._reply(500, "{}")
                return
            fake.hang.wait(20)
            self._reply(fake.status, json.dumps(fake.answer(body)))

        def _reply(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            with contextlib.suppress(ConnectionError):  # whoever asked may have gone
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    return Handler


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        fake.hang.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def server(fake: Fake) -> Iterator[Server]:
    with serving(fake) as url:
        yield Server(url, "mine")


def test_answers_come_back_in_the_order_of_the_requests(fake: Fake, server: Server) -> None:
    heard: dict[int, Answer] = {}
    requests = [Request([place], 5, seed=place) for place in range(20)]
    found = server.generate(requests, SamplingConfig(temperature=1.0, top_p=0.9), 4, heard.__setitem__)
    assert [answer.token_ids for answer in found] == [(place, place) for place in range(20)]
    assert [heard[place] for place in range(20)] == found
    assert found[0].histogram == (1, 2, 3) and found[0].finish == "length"
    sent = sorted(fake.sent, key=lambda body: body["prompt"])
    assert [body["seed"] for body in sent] == list(range(20))
    assert all((body["model"], body["max_tokens"], body["top_p"]) == ("mine", 5, 0.9) for body in sent)


def test_no_seed_where_it_says_nothing_or_does_harm(fake: Fake, server: Server) -> None:
    server.generate([Request([1], 5)], SamplingConfig(), 1)
    Server(server.url, "mine", seeds=False).generate([Request([1], 5)], SamplingConfig(temperature=1.0), 1)
    assert all("seed" not in body for body in fake.sent) and len(fake.sent) == 2


def test_a_server_that_reports_nothing_per_request(fake: Fake, server: Server) -> None:
    fake.histogram = None
    assert server.generate([Request([1], 5)], SamplingConfig(), 1)[0].histogram is None


def test_a_failure_ends_what_is_on_its_way(fake: Fake, server: Server) -> None:
    """Seven requests hang; the eighth fails, and nobody waits for the seven."""
    fake.hang.clear()
    begun = time.monotonic()
    with pytest.raises(ServingError, match="vLLM failed while it answered"):
        server.generate([*(Request([1], 5) for _ in range(7)), Request([999], 5)], SamplingConfig(), 8)
    assert time.monotonic() - begun < 10


def test_a_refused_prompt_says_what_the_server_said(fake: Fake, server: Server) -> None:
    fake.status = 400
    with pytest.raises(ServingError, match="vLLM refused a prompt"):
        server.generate([Request([1], 5)], SamplingConfig(), 1)


def test_a_server_that_is_gone(free_port: int) -> None:
    gone = Server(f"http://127.0.0.1:{free_port}", "mine")
    with pytest.raises(ServingError, match="vLLM stopped answering"):
        gone.generate([Request([1], 5)], SamplingConfig(), 1)
    with pytest.raises(ServingError, match=r"does not answer /metrics"):
        gone.counters()
    with pytest.raises(InputError, match=r"is no vLLM server that answers"):
        connect(gone.url)


def test_counters_are_summed_over_engines(server: Server) -> None:
    assert server.counters() == Counters(150, (120, 30))
    assert Counters(150, (120, 30)).since(Counters(100, (100,))) == Counters(50, (20, 30))


def test_a_server_that_does_not_speculate(fake: Fake, server: Server) -> None:
    fake.metrics = "# nothing\n"
    with pytest.raises(ServingError, match="does not speculate"):
        server.counters()
    assert connect(server.url).effective == ("0.32.0", "none", 0, None)


def test_counting_waits_for_what_answers_say(fake: Fake, server: Server) -> None:
    """vLLM counts a step after it has sent its tokens."""
    later = METRICS.replace("} 100.0", "} 110.0")
    timer = threading.Timer(0.3, setattr, (fake, "metrics", later))
    timer.start()
    assert server.settled(160).drafts == 160
    timer.join()


def test_a_running_server_is_found_by_its_url(server: Server) -> None:
    found = connect(f"{server.url}/v1/")
    assert (found.url, found.model) == (server.url, "mine")
    assert found.effective == ("0.32.0", None, 2, None)


def test_margin_of_two_tokens(fake: Fake, server: Server) -> None:
    assert server.margin([1, 2], 7, 8) == pytest.approx(0.25)
    assert server.margin([1, 2], 8, 7) == pytest.approx(-0.25)
    assert server.margin([1, 2], 7, 1000) == pytest.approx(2.5)  # at least so much
    assert server.margin([1, 2], 1000, 1001) is None
    assert fake.sent[0]["max_tokens"] == 1 and fake.sent[0]["temperature"] == 0.0
