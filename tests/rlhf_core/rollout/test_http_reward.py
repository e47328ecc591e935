"""The client of reward services and of judges, against services on the loopback."""

import asyncio
import socket
import time
from typing import Any

import pytest
from json_service import Service, serving

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rewards import HttpReward, JudgeReward
from rlhf_core.rollout import http_client
from rlhf_core.rollout.http_reward import HttpRewards
from rlhf_core.rollout.judge import Judge, fill_template
from rlhf_core.rollout.outcomes import Failed, Outcome, Response, Scored

RESPONSES = [Response(f"p{n} r{n}</s>", f"p{n}", f"r{n}", str(n)) for n in range(5)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_FIRST_WAIT_S", 0.01)


def score(urls: list[str], responses: list[Response] = RESPONSES, **settings: Any) -> list[Outcome]:
    async def scored() -> list[Outcome]:
        client = HttpRewards(HttpReward(urls=tuple(urls), **settings))
        try:
            return await client.score(responses)
        finally:
            await client.close()

    return asyncio.run(scored())


def values(body: dict[str, Any], _: int = 0) -> tuple[int, Any]:
    return 200, {"rewards": [float(label) for label in body["labels"]]}


def test_batches_in_openrlhfs_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(body: dict[str, Any], _: int) -> tuple[int, Any]:
        size = len(body["query"])
        return 200, {"rewards": [[0.0]] * size, "scores": [0.25] * size, "extra_logs": {"length": [2] * size, "v": 1}}

    monkeypatch.setenv("REWARD_TOKEN", "t0ken")
    with serving(answer) as service:
        found = score([service.url], batch_size=2, concurrency=1, token_env="REWARD_TOKEN")
    assert found == [Scored(0.0, 0.25, {"length": 2.0, "v": 1.0})] * 5
    assert [len(body["query"]) for body in service.requests] == [2, 2, 1]
    assert service.requests[0] == {"query": ["p0 r0</s>", "p1 r1</s>"], "prompts": ["p0", "p1"], "labels": ["0", "1"]}
    assert service.tokens == ["Bearer t0ken"] * 3
    assert service.connections == 1


def test_a_bounded_number_is_under_way() -> None:
    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        time.sleep(0.02)
        return values(body)

    with serving(answer) as service:
        found = score([service.url], batch_size=1, concurrency=2)
    assert [one.value for one in found if isinstance(one, Scored)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert service.most_at_once == 2
    assert service.connections == 2


def test_endpoints_are_used_in_turn_and_a_dead_one_is_passed_by() -> None:
    with socket.socket() as closed, serving(values) as first, serving(values) as second:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        found = score([first.url, dead, second.url], batch_size=1)
    assert [one.value for one in found if isinstance(one, Scored)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(first.requests) + len(second.requests) == 5
    assert first.requests
    assert second.requests


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(status: int) -> None:
    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return values(body) if number == 2 else (status, {"detail": "busy"})

    with serving(answer) as service:
        assert score([service.url], RESPONSES[:1], attempts=3) == [Scored(0.0)]
    assert len(service.requests) == 3


def test_tries_are_bounded_and_the_last_fault_is_named() -> None:
    with serving(lambda body, number: (503, {"detail": "busy"})) as service:
        found = score([service.url], RESPONSES[:2], attempts=2)
    assert found == [Failed("error", f'{service.url}: HTTP 503: {{"detail": "busy"}}')] * 2
    assert len(service.requests) == 2


def test_a_service_that_answers_slowly_runs_out_of_time() -> None:
    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        time.sleep(0.5)
        return values(body)

    with serving(answer) as service:
        found = score([service.url], RESPONSES[:1], timeout_s=0.1, attempts=1)
    assert found == [Failed("timeout", f"{service.url}: no answer within 0.1 s")]


def test_a_refused_batch_is_sent_one_by_one() -> None:
    """One query that is too long costs no other its reward."""

    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return (422, {"detail": "too long"}) if "3" in body["labels"] else values(body)

    with serving(answer) as service:
        found = score([service.url])
    assert [one.value if isinstance(one, Scored) else one.reason for one in found] == [0.0, 1.0, 2.0, "error", 4.0]
    assert len(service.requests) == 6


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"<html>", "unparsable"),
        ([1.0, 2.0], "unparsable"),
        ({"rewards": [1.0]}, "unparsable"),
        ({"rewards": 1.0}, "unparsable"),
        ({"rewards": ["good", "bad"]}, "unparsable"),
        ({"scores": [1.0, 1.0]}, "unparsable"),
        ({"rewards": [None, None]}, "error"),
        (b'{"rewards": [NaN, Infinity]}', "unparsable"),
    ],
)
def test_an_answer_of_another_form_is_a_failure(given: Any, reason: str) -> None:
    with serving(lambda body, number: (200, given)) as service:
        found = score([service.url], RESPONSES[:2])
    assert [one.reason for one in found if isinstance(one, Failed)] == [reason] * 2


def test_a_token_that_is_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with pytest.raises(SettingsError, match="token_env names the environment variable REWARD_TOKEN, which is not set"):
        score(["http://127.0.0.1:1"], token_env="REWARD_TOKEN")


# -- the judge ------------------------------------------------------------------------------------------------------


def ask(service: Service, **settings: Any) -> list[str | Failed]:
    async def asked() -> list[str | Failed]:
        template = "Q: {prompt} A: {response} truth {label}"
        judge = Judge(JudgeReward(url=f"{service.url}/v1", model="m", template=template, attempts=2, **settings))
        try:
            return await judge.ask(RESPONSES[:2])
        finally:
            await judge.close()

    return asyncio.run(asked())


def test_a_judge_is_asked_about_each_response(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return 200, {"choices": [{"message": {"role": "assistant", "content": f"On {body['messages'][0]['content']}"}}]}

    monkeypatch.setenv("JUDGE_KEY", "k3y")
    with serving(answer) as service:
        assert ask(service, key_env="JUDGE_KEY") == ["On Q: p0 A: r0 truth 0", "On Q: p1 A: r1 truth 1"]
    request = sorted(service.requests, key=str)[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.0, 512)
    assert service.tokens == ["Bearer k3y"] * 2


def test_a_judge_that_says_nothing_is_a_failure() -> None:
    with serving(lambda body, number: (200, {"choices": []})) as service:
        assert [one.reason for one in ask(service) if isinstance(one, Failed)] == ["unparsable"] * 2
    with serving(lambda body, number: (401, {"error": "no key"})) as service:
        assert [one.reason for one in ask(service) if isinstance(one, Failed)] == ["error"] * 2
    assert len(service.requests) == 2


def test_a_template_is_filled_once() -> None:
    response = Response("", "{label}", "{prompt} {x} {response}", "7")
    assert fill_template("{prompt}|{response}|{label}|{other}", response) == "{label}|{prompt} {x} {response}|7|{other}"
