"""The mix of sources: what each says, failures and their policies. Services and processes are real."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from json_service import Service, serving
from pydantic import ValidationError

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.rollout.outcomes import Failed, Outcome, Response, Scored
from rlhf_core.rollout.reward_sources import RewardError, RewardSources, settle
from rlhf_core.rollout.rewards import RewardMix

FUNCTION = """
import time
calls = []
def reward_func(queries, prompts, labels):
    if any("hang" in query for query in queries):
        time.sleep(60)
    return {"rewards": [float(len(query)) for query in queries], "extra_logs": {"batch": len(queries)}}
def flaky(completion, label):
    calls.append(completion)
    if len(calls) < 3:
        raise RuntimeError("not yet")
    return 1.0
"""


def response(completion: str, label: str = "", prompt: str = "p") -> Response:
    return Response(f"{prompt} {completion}", prompt, completion, label)


def score(settings: dict[str, Any], *responses: Response) -> list[dict[str, Outcome]]:
    with RewardSources(RewardSettings.model_validate(settings)) as sources:
        return sources.score(responses)


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(FUNCTION)
    return str(tmp_path / "reward.py")


@pytest.fixture
def service() -> Iterator[Service]:
    """A reward service and a judge in one."""

    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if "messages" in body:
            said = body["messages"][0]["content"]
            return 200, {"choices": [{"message": {"content": f"Score: {len(said)}" if "ok" in said else "Hm."}}]}
        return 200, {"rewards": [len(query) for query in body["query"]]}

    with serving(answer) as made:
        yield made


def test_every_source_scores_every_response(function: str, service: Service, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    settings = {
        "exact": 1.0,
        "math": 0.5,
        "regex": {"pattern": "ok"},
        "json_schema": {"path": str(tmp_path / "schema.json")},
        "length": {"high": 3},
        "functions": [{"path": function, "name": "mine", "batch_size": 2}],
        "http": {"urls": [service.url]},
        "judge": {"url": service.url, "model": "m", "template": "{response}"},
        "sandbox": {"workers": 1},
    }
    (first, second) = score(settings, response("= 7 ok", "7"), response("8", "8"))
    parsed = {"unparsable": 0.0}
    assert first == {
        "exact": Scored(0.0),
        "math": Scored(1.0, extra=parsed),
        "regex": Scored(1.0),
        "json_schema": Scored(0.0, extra={"unparsable": 1.0}),
        "length": Scored(0.0),
        "mine": Scored(8.0, extra={"batch": 2.0}),
        "http": Scored(8.0),
        "judge": Scored(6.0),
    }
    assert second == {
        "exact": Scored(0.0),
        "math": Scored(1.0, extra=parsed),
        "regex": Scored(0.0),
        "json_schema": Scored(1.0, extra=parsed),
        "length": Scored(1.0),
        "mine": Scored(3.0, extra={"batch": 2.0}),
        "http": Scored(3.0),
        "judge": Failed("unparsable", "no score in the judge's answer 'Hm.'"),
    }


def test_code_is_run_against_the_labels_tests() -> None:
    label = json.dumps(["assert f(1) == 2", "assert f(2) == 5"])
    right, wrong = "def f(x):\n    return x * x + 1", "def f(x):\n    return 2"
    outcomes = score(
        {"code": {"partial": True}}, response(right, label), response(wrong, label), response(right, "7 +")
    )
    found = [one["code"] for one in outcomes]
    assert [one.value for one in found if isinstance(one, Scored)] == [1.0, 0.5]
    assert isinstance(found[2], Failed)
    assert found[2].reason == "unparsable"


def test_a_batch_that_fails_is_called_one_by_one(function: str) -> None:
    settings = {"functions": [{"path": function, "batch_size": 3}], "sandbox": {"workers": 1, "timeout_s": 0.4}}
    found = [one["function"] for one in score(settings, response("a"), response("hang"), response("abc"), response(""))]
    assert found == [
        Scored(3.0, extra={"batch": 1.0}),
        Failed("timeout", "no answer within 0.4 s"),
        Scored(5.0, extra={"batch": 1.0}),
        Scored(2.0, extra={"batch": 1.0}),
    ]


@pytest.mark.parametrize(("retries", "scored"), [(1, False), (2, True)])
def test_retry_scores_again(function: str, retries: int, scored: bool) -> None:
    """The function raises in its first two calls."""
    settings = {
        "functions": [{"path": function, "function": "flaky"}],
        "on_failure": "retry",
        "retries": retries,
        "sandbox": {"workers": 1},
    }
    (found,) = score(settings, response("a"))
    assert found["function"] == (Scored(1.0) if scored else Failed("error", "RuntimeError: not yet"))


def test_the_other_policies_score_once(function: str) -> None:
    settings = {"functions": [{"path": function, "function": "flaky"}], "sandbox": {"workers": 1}}
    (found,) = score(settings, response("a"))
    assert isinstance(found["function"], Failed)


def test_mathematics_is_the_same_in_processes_under_load() -> None:
    """Each answer 1 / n against 1 / 7, while other processes use up the cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        answers = [response(rf"so \boxed{{\frac{{1}}{{{n}}}}}", "1/7") for n in range(1, 31)]
        found = [one["math"] for one in score({"math": 1.0}, *answers)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    parsed = {"unparsable": 0.0}
    assert found == [Scored(float(n == 7), extra=parsed) for n in range(1, 31)]


def test_right_wrong_unparsable_and_pathological_answers_are_told_apart() -> None:
    answers = [r"\boxed{9^{9^{9}}}", r"\boxed{(10^9)!}", "7", "no answer", "8"]
    settings = {"math": 1.0, "sandbox": {"workers": 2, "timeout_s": 1.0}}
    found = [one["math"] for one in score(settings, *[response(answer, "7") for answer in answers])]
    assert found == [
        Failed("timeout", "no answer within 1 s"),
        Failed("timeout", "no answer within 1 s"),
        Scored(1.0, extra={"unparsable": 0.0}),
        Scored(0.0, extra={"unparsable": 1.0}),
        Scored(0.0, extra={"unparsable": 0.0}),
    ]


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({}, "every weight is 0"),
        ({"regex": {"pattern": "a", "weight": 0.0}}, "every weight is 0"),
        ({"regex": {"pattern": "("}}, "is no regular expression"),
        ({"regex": {"pattern": "a", "compare": True}}, "has no group"),
        ({"length": {"low": 3, "high": 2}}, "high 2 is below low 3"),
        ({"functions": [{"path": "a.py"}, {"path": "b.py"}]}, "the name function is taken"),
        ({"functions": [{"path": "a.py", "name": "rm"}]}, "the name rm is taken"),
        ({"http": {"urls": ["ftp://host"]}}, "is no http or https URL"),
        ({"http": {"urls": ["https://user:pass@host/score"]}}, "a URL with a user or password in it"),
        ({"http": {"urls": ["http://token@host"]}}, "a URL with a user or password in it"),
        ({"judge": {"url": "http://h", "model": "m", "template": "{prompt}"}}, "does not hold {response}"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RewardSettings.model_validate(settings)
    assert fault in str(raised.value)


def test_files_and_secrets_are_looked_for_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (tmp_path / "schema.json").write_text('{"type": "wrong"}')
    judge = {"url": "http://h", "model": "m", "template": "{response}", "key_env": "NO_SUCH_KEY"}
    for settings, fault in [
        (
            {"functions": [{"path": str(tmp_path / "absent.py")}]},
            r"absent.py cannot be read: .*give the path of a Python",
        ),
        ({"json_schema": {"path": str(tmp_path / "schema.json")}}, "schema.json is no JSON schema"),
        ({"json_schema": {"path": str(tmp_path / "absent.json")}}, "absent.json is no JSON schema"),
        ({"judge": judge}, "key_env names the environment variable NO_SUCH_KEY, which is not set"),
    ]:
        with pytest.raises(SettingsError, match=fault):
            RewardSources(RewardSettings.model_validate(settings))


def test_weights_of_all_sources_that_are_measured() -> None:
    settings = RewardSettings.model_validate(
        {"rm": 0.2, "regex": {"pattern": "a", "weight": 0.0}, "functions": [{"path": "a.py", "weight": -2.0}]}
    )
    assert settings.weights == {"rm": 0.2, "exact": 0.0, "regex": 0.0, "function": -2.0}
    # By hand: 0.2 * (3 - 1) / 2 + 0 * 1 - 2 * 0.5.
    mix = RewardMix(settings, rm_mean=1.0, rm_std=2.0)
    assert mix.total({"rm": 3.0, "exact": 1.0, "regex": 1.0, "function": 0.5}) == pytest.approx(-0.8)


# -- failures -------------------------------------------------------------------------------------------------------

OUTCOMES: list[dict[str, Outcome]] = [
    {"a": Scored(0.0, 0.5, {"x": 1.0}), "b": Scored(2.0)},
    {"a": Scored(1.0, None, {"x": 3.0}), "b": Failed("timeout", "late")},
    {"a": Scored(0.0), "b": Scored(0.0)},
    {"a": Failed("memory", "much"), "b": Scored(0.0)},
    {"a": Scored(0.0), "b": Failed("timeout", "late")},
]
GROUPS = [4, 4, 5, 6, 6]


def mixed(on_failure: str, b: float = 1.0) -> RewardSettings:
    functions = [{"path": "a.py", "name": "a"}, {"path": "b.py", "name": "b", "weight": b}]
    return RewardSettings.model_validate({"functions": functions, "on_failure": on_failure})


@pytest.mark.parametrize("on_failure", ["drop_group", "retry"])
def test_groups_with_a_failure_are_dropped_and_counted(on_failure: str) -> None:
    settled = settle(OUTCOMES, GROUPS, mixed(on_failure))
    assert settled.kept == [False, False, True, False, False]
    assert settled.values[0] == {"a": 0.0, "b": 2.0}
    assert settled.scores[0] == {"a": 0.5, "b": 2.0}
    assert settled.values[1] == {"a": 1.0}
    assert settled.metrics == {
        "reward/failed": 3.0,
        "reward/dropped_groups": 2.0,
        "reward/b/failed/timeout": 2.0,
        "reward/a/failed/memory": 1.0,
        "reward/a/x": 2.0,
    }


def test_fail_ends_the_stage() -> None:
    with pytest.raises(RewardError, match="3 rewards failed, the first of source b: timeout: late; mend it"):
        settle(OUTCOMES, GROUPS, mixed("fail"))
    assert settle(OUTCOMES[2:3], [0], mixed("fail")).kept == [True]


def test_a_source_that_is_only_measured_drops_nothing() -> None:
    settled = settle(OUTCOMES, GROUPS, mixed("drop_group", b=0.0))
    assert settled.kept == [True, True, True, False, False]
    assert settled.metrics["reward/b/failed/timeout"] == 2.0
