"""The service over real connections on the loopback, before a model whose pace and faults the test decides."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rewards import HttpReward
from rlhf_core.rollout.http_reward import HttpRewards
from rlhf_core.rollout.outcomes import Response, Scored
from rlhf_core.rollout.reward_models import Encoded, Judged, QueryError
from rlhf_core.rollout.reward_server import Limits, bind, check_access, make_app


@dataclass
class Lengths:
    """A query's reward is its length, of 17 none. A forward pass waits for `go`, reading a query "slow" for `read`."""

    kind: str = "reward"
    batches: list[int] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    reading: threading.Event = field(default_factory=threading.Event)
    read: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.go.set()

    def encode(self, query: str, prompt: str | None) -> Encoded:
        if query == "long":
            raise QueryError("the query has 9 tokens, more than 4")
        if query == "slow":
            self.reading.set()
            self.read.wait(30)
        return Encoded(np.zeros(len(query), np.int64), [])

    def score(self, encoded: Sequence[Encoded]) -> list[Judged]:
        self.begun.set()
        self.go.wait(30)
        self.batches.append(len(encoded))
        if any(len(one.ids) == 13 for one in encoded):
            raise ValueError("13 is not to be scored")
        lengths = [len(one.ids) for one in encoded if len(one.ids) != 15]
        return [Judged(float("nan") if length == 17 else float(length)) for length in lengths]


@contextmanager
def serving(model: Lengths, token: str | None = None, **limits: Any) -> Iterator[str]:
    with bind("127.0.0.1", 0) as listening:
        app = make_app(model, token=token, limits=Limits(**limits))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            model.go.set()
            model.read.set()
            server.should_exit = True
            thread.join()


def post(url: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/get_reward", json=body, headers=headers, timeout=30, trust_env=False)


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", headers=headers, timeout=5, trust_env=False)


def wait(until: Any) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_protocol() -> None:
    with serving(Lengths()) as url:
        answer = post(url, {"query": ["", "ab"], "prompts": ["", "a"], "labels": [1, None], "more": {}})
        assert answer.json() == {"rewards": [0.0, 2.0], "scores": [0.0, 2.0], "extra_logs": {}}
        assert get(url, "/health").json() == {"status": "ok", "kind": "reward"}


def test_our_client_and_this_service_understand_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "t")

    async def score(url: str) -> list[Any]:
        settings = HttpReward(urls=(f"{url}/get_reward",), batch_size=2, token_env="TOKEN", attempts=1)
        client = HttpRewards(settings)
        found = await client.score([Response(query, "", "", "") for query in ("a", "long", "", "abc", "n" * 17, "ab")])
        await client.close()
        return found

    with serving(Lengths(), token="t") as url:
        found = asyncio.run(score(url))
    values = [one.value if isinstance(one, Scored) else one.reason for one in found]
    assert values == [1.0, "error", 0.0, 3.0, "error", 2.0]
    assert "query.0: the query has 9 tokens, more than 4" in found[1].message


def test_requests_share_batches() -> None:
    """While one batch is in its forward pass, what comes waits, and makes the next ones together."""
    model = Lengths()
    model.go.clear()
    with serving(model, batch_size=4) as url, ThreadPoolExecutor(8) as pool:
        first = pool.submit(post, url, {"query": ["a"]})
        assert model.begun.wait(30)
        others = [pool.submit(post, url, {"query": ["b" * number]}) for number in range(1, 8)]
        wait(lambda: "rlhf_reward_pending 7.0" in get(url, "/metrics").text)
        model.go.set()
        assert first.result().json()["rewards"] == [1.0]
        assert [one.result().json()["rewards"] for one in others] == [[float(number)] for number in range(1, 8)]
    assert model.batches == [1, 4, 3]


def test_the_loop_answers_during_a_forward_pass() -> None:
    model = Lengths()
    model.go.clear()
    with serving(model) as url, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, url, {"query": ["a"]})
        assert model.begun.wait(30)
        assert get(url, "/health").status_code == 200
        assert not waiting.done()
        model.go.set()
        assert waiting.result().status_code == 200


def test_a_token_is_asked_for() -> None:
    with serving(Lengths(), token="t0ken") as url:
        assert post(url, {"query": ["a"]}).status_code == 401
        assert post(url, {"query": ["a"]}, Authorization="Bearer other").status_code == 401
        assert post(url, {"query": ["a"]}, Authorization="Bearer t0ken").status_code == 200
        assert get(url, "/metrics").status_code == 401
        assert get(url, "/metrics", Authorization="Bearer t0ken").status_code == 200
        assert get(url, "/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "fault"),
    [
        ({}, 422, "query: Field required"),
        ({"query": []}, 422, "query: List should have at least 1 item"),
        ({"query": ["a"], "prompts": []}, 422, "prompts has 0 entries for 1 queries"),
        ({"query": ["a", "long"]}, 422, "query.1: the query has 9 tokens, more than 4"),
        ({"query": ["a"] * 5}, 413, "5 queries are more than 4 in a request"),
        ({"query": ["a" * 2000]}, 413, "the request exceeds 1000 bytes"),
        ({"query": ["a" * 13]}, 500, "the model failed: 13 is not to be scored"),
        ({"query": ["a" * 15]}, 500, "the model failed: zip() argument 2 is shorter"),
    ],
)
def test_what_is_wrong_with_a_request(body: Any, status: int, fault: str) -> None:
    with serving(Lengths(), queries=4, body_bytes=1000) as url:
        answer = post(url, body)
        assert (answer.status_code, fault in answer.json()["detail"]) == (status, True), answer.text
        assert post(url, {"query": ["ab"]}).json()["rewards"] == [2.0]
        text = get(url, "/metrics").text
    assert f'rlhf_reward_requests_total{{status="{status}"}} 1.0' in text
    assert 'rlhf_reward_requests_total{status="200"} 1.0' in text
    assert "rlhf_reward_queries_total 1.0" in text


def test_a_full_queue_sends_away_and_a_slow_answer_is_given_up() -> None:
    model = Lengths()
    model.go.clear()
    with serving(model, pending=2, timeout_s=0.3) as url:
        busy = post(url, {"query": ["a"] * 3})
        assert (busy.status_code, busy.headers["Retry-After"]) == (503, "1")
        assert post(url, {"query": ["a"]}).status_code == 504


def test_queries_that_are_being_read_count_as_waiting() -> None:
    model = Lengths()
    with serving(model, pending=2) as url, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, url, {"query": ["slow", "a"]})
        assert model.reading.wait(30)
        assert post(url, {"query": ["a"]}).status_code == 503
        model.read.set()
        assert slow.result().json()["rewards"] == [4.0, 1.0]
        assert post(url, {"query": ["a", "b"]}).status_code == 200


def test_only_the_loopback_needs_no_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.3.2.1"):
        check_access(host, None)
    check_access("0.0.0.0", "t")
    for host in ("0.0.0.0", "::", "10.0.0.1", "host.example"):
        with pytest.raises(SettingsError, match="--no-token is for the loopback"):
            check_access(host, None)


def test_a_port_that_is_taken_is_one_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(SettingsError, match="cannot listen on 127"):
            bind("127.0.0.1", taken.getsockname()[1])
