"""The client of reward services against one that breaks the protocol: raw bytes over real connections."""

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from rlhf_core.config.rewards import HttpReward, JudgeReward
from rlhf_core.rollout import http_client
from rlhf_core.rollout.http_reward import HttpRewards
from rlhf_core.rollout.judge import Judge
from rlhf_core.rollout.outcomes import Failed, Outcome, Response, Scored

# What the service does with a connection after the n-th request (from 0) on it was read; True: it is kept.
Speak = Callable[[socket.socket, int], bool]
RESPONSES = [Response(f"q{n}", f"p{n}", f"r{n}", str(n)) for n in range(2)]


@dataclass
class Raw:
    url: str
    requests: int = 0
    connections: int = 0


@contextmanager
def speaking(speak: Speak) -> Iterator[Raw]:
    listening = socket.create_server(("127.0.0.1", 0))
    raw = Raw(f"http://127.0.0.1:{listening.getsockname()[1]}/get_reward")

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = listening.accept()
                raw.connections += 1
                threading.Thread(target=converse, args=(connection,), daemon=True).start()

    def converse(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while read_request(connection):
                number, raw.requests = raw.requests, raw.requests + 1
                if not speak(connection, number):
                    return

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield raw
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def read_request(connection: socket.socket) -> bool:
    got = b""
    while b"\r\n\r\n" not in got:
        part = connection.recv(2**16)
        if not part:
            return False
        got += part
    head, _, body = got.partition(b"\r\n\r\n")
    (length,) = (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(2**16)
    return True


def http(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


REWARDS = json.dumps({"rewards": [0.0, 2.0]}).encode()
GOOD = http(REWARDS)


def says(*answers: bytes, close: bool = True) -> Speak:
    """The n-th answer to the n-th request, the last one to all others."""

    def speak(connection: socket.socket, number: int) -> bool:
        connection.sendall(answers[min(number, len(answers) - 1)])
        return not close

    return speak


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_FIRST_WAIT_S", 0.01)


def score(raw: Raw, times: int = 1, attempts: int = 3, timeout_s: float = 30.0) -> list[Outcome]:
    async def scored() -> list[Outcome]:
        client = HttpRewards(HttpReward(urls=(raw.url,), attempts=attempts, timeout_s=timeout_s))
        try:
            found = [await client.score(RESPONSES) for _ in range(times)]
        finally:
            await client.close()
        assert all(one == found[0] for one in found)
        return found[0]

    return asyncio.run(scored())


@pytest.mark.parametrize(
    "broken",
    [
        b"",  # closed without a word
        GOOD[:-5],  # closed within the body
        GOOD[:20],  # closed within the head
        b"SSH-2.0-OpenSSH_9.2\r\n",
        http(REWARDS, "Content-Encoding: gzip"),  # says gzip, and is none
        http(gzip.compress(REWARDS)[:-9], "Content-Encoding: gzip", length=len(gzip.compress(REWARDS))),
        http(b"busy", "Retry-After: \xb2", status="503 Busy"),  # a digit that is no number
    ],
    ids=["nothing", "half a body", "half a head", "no http", "no gzip", "half a gzip", "odd retry-after"],
)
def test_a_broken_answer_is_tried_again_and_is_a_failure_in_the_end(broken: bytes) -> None:
    with speaking(says(broken, broken, GOOD)) as raw:
        assert score(raw) == [Scored(0.0), Scored(2.0)]
    assert raw.requests == 3
    with speaking(says(broken)) as raw:
        found = score(raw, attempts=2)
    assert [one.reason for one in found if isinstance(one, Failed)] == ["error", "error"]
    assert raw.requests == 2


@pytest.mark.parametrize(
    "body",
    [b"[" * 10**5, b'{"rewards": [1' + b"0" * 400 + b", 1]}", b'{"rewards": [1e999, 1]}', b"\xff\xfe", b"1" * 5000],
    ids=["deep", "beyond float", "infinite", "no utf-8", "a long number"],
)
def test_what_is_no_reward_is_unparsable(body: bytes) -> None:
    with speaking(says(http(body))) as raw:
        found = score(raw)
    assert "unparsable" in [one.reason for one in found if isinstance(one, Failed)]
    assert raw.requests == 1


def test_a_connection_is_kept_and_one_that_was_closed_meanwhile_is_opened_anew() -> None:
    with speaking(says(GOOD, close=False)) as raw:
        score(raw, times=5)
    assert (raw.requests, raw.connections) == (5, 1)
    with speaking(says(GOOD, close=True)) as raw:
        score(raw, times=5)
    assert raw.requests == 5
    assert raw.connections >= 5


def test_an_answer_that_drips_runs_out_of_time() -> None:
    """There is always a byte before a timeout of a single read would end."""

    def drip(connection: socket.socket, _: int) -> bool:
        connection.sendall(http(b"", length=10**6))
        while True:
            connection.sendall(b" ")
            time.sleep(0.01)

    with speaking(drip) as raw:
        found = score(raw, attempts=2, timeout_s=0.2)
    assert found == [Failed("timeout", f"{raw.url}: no answer within 0.2 s")] * 2


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_ANSWER_BYTES", 10**6)

    def flood(connection: socket.socket, _: int) -> bool:
        connection.sendall(http(b"", length=10**12))
        while True:
            connection.sendall(b" " * 2**16)

    with speaking(flood) as raw:
        found = score(raw)
    assert found == [Failed("error", f"{raw.url}: the answer exceeds 1000000 bytes")] * 2
    assert raw.requests == 1


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "404 Not Found", "302 Found"])
def test_a_wrong_address_or_token_is_asked_once(status: str) -> None:
    """Neither again nor one by one: no other query would fare better."""
    with speaking(says(http(b"no", status=status))) as raw:
        found = score(raw)
    assert found == [Failed("error", f"{raw.url}: HTTP {status[:3]}: no")] * 2
    assert raw.requests == 1


def ask(raw: Raw) -> list[str | Failed]:
    async def asked() -> list[str | Failed]:
        judge = Judge(JudgeReward(url=raw.url, model="m", template="{response}", attempts=3))
        try:
            return await judge.ask(RESPONSES[:1])
        finally:
            await judge.close()

    return asyncio.run(asked())


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10**5,
        b'"Score: 7"',
        b"null",
        b'{"choices": {"0": 1}}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": null}}]}',
        b'{"choices": [{"message": {"content": [{"type": "text", "text": "Score: 7"}]}}]}',
    ],
)
def test_a_judge_that_answers_in_another_form_is_unparsable(body: bytes) -> None:
    with speaking(says(http(body))) as raw:
        (found,) = ask(raw)
    assert isinstance(found, Failed)
    assert found.reason == "unparsable"
    assert raw.requests == 1


def test_a_judge_that_breaks_off_is_asked_again() -> None:
    good = http(b'{"choices": [{"message": {"content": "Score: 7"}}]}')
    with speaking(says(b"", good[:-9], good)) as raw:
        assert ask(raw) == ["Score: 7"]
    assert raw.requests == 3
