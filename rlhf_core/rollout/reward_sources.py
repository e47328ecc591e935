"""All sources of rewards that read text: what each says of each response, and what becomes of failures."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.base import SettingsError
from rlhf_core.config.rewards import CodeReward, FunctionReward, JudgeReward, RewardSettings
from rlhf_core.rollout import verifiers
from rlhf_core.rollout.code_runner import read_tests
from rlhf_core.rollout.http_client import EventLoop
from rlhf_core.rollout.http_reward import HttpRewards
from rlhf_core.rollout.judge import Judge
from rlhf_core.rollout.outcomes import Failed, Outcome, Response, Scored, one_line
from rlhf_core.rollout.sandbox import Call, Sandbox, Setup

# Starts scoring; the function that it returns waits for the outcomes.
Wait = Callable[[], list[Outcome]]
Start = Callable[[Sequence[Response]], Wait]

_CODE_MARGIN_S = 5.0  # starting interpreters, over what the tests may take


class RewardError(Exception):
    """A response could not be scored, and the settings say that the stage ends then. One line."""


class RewardSources:
    """The sources of `settings` but the models of the trainer's ranks (rm, prm). To be closed.

    Processes are started where a source needs them, and serve the whole run.
    """

    def __init__(self, settings: RewardSettings, scratch: Path | None = None):
        """Raises SettingsError for a function, schema or secret that cannot be had."""
        self.settings = settings
        self._sandbox: Sandbox | None = None
        self._loop: EventLoop | None = None
        self._to_close: list[HttpRewards | Judge] = []
        setup = _setup(settings)
        try:
            if setup is not None:
                self._sandbox = Sandbox(settings.sandbox, setup, scratch)
            if settings.http is not None or settings.judge is not None:
                self._loop = EventLoop()
            self._sources = self._make_sources()
        except BaseException:
            self.close()
            raise

    def score(self, responses: Sequence[Response]) -> list[dict[str, Outcome]]:
        """For each response what each source says of it."""
        return self.start(responses)()

    def start(self, responses: Sequence[Response]) -> Callable[[], list[dict[str, Outcome]]]:
        """As `score`; the function that it returns waits, so that the ranks can work meanwhile."""
        waits = {name: source(responses) for name, source in self._sources.items()}

        def wait() -> list[dict[str, Outcome]]:
            found = {name: self._retried(name, responses, waiting()) for name, waiting in waits.items()}
            return [{name: outcomes[number] for name, outcomes in found.items()} for number in range(len(responses))]

        return wait

    def _retried(self, name: str, responses: Sequence[Response], outcomes: list[Outcome]) -> list[Outcome]:
        if self.settings.on_failure != "retry":
            return outcomes
        for _ in range(self.settings.retries):
            failed = [number for number, one in enumerate(outcomes) if isinstance(one, Failed)]
            if not failed:
                break
            again = self._sources[name]([responses[number] for number in failed])()
            for number, outcome in zip(failed, again, strict=True):
                outcomes[number] = outcome
        return outcomes

    def close(self) -> None:
        if self._loop is not None:
            for one in self._to_close:
                self._loop.submit(one.close()).result()
            self._loop.close()
        if self._sandbox is not None:
            self._sandbox.close()

    def __enter__(self) -> "RewardSources":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one source each ------------------------------------------------------------------------------------------

    def _make_sources(self) -> dict[str, Start]:
        settings = self.settings
        sources: dict[str, Start] = {"exact": _here(lambda one: verifiers.exact(one.completion, one.label))}
        if settings.math:
            sources["math"] = self._verifier("math", lambda one: {"completion": one.completion, "label": one.label})
        if (regex := settings.regex) is not None:
            given = {"pattern": regex.pattern, "compare": regex.compare}
            sources["regex"] = self._verifier(
                "regex", lambda one: {"completion": one.completion, "label": one.label, **given}
            )
        if settings.json_schema is not None:
            schema = read_schema(settings.json_schema.path)
            sources["json_schema"] = self._verifier(
                "json_schema", lambda one: {"completion": one.completion, "schema": schema}
            )
        if (length := settings.length) is not None:
            bounds: dict[str, Any] = {"unit": length.unit, "low": length.low, "high": length.high}
            sources["length"] = _here(lambda one: verifiers.length(one.completion, **bounds))
        if settings.code is not None:
            sources["code"] = self._code(settings.code)
        sources |= {function.name: self._function(function) for function in settings.functions}
        if settings.http is not None:
            sources["http"] = self._http(HttpRewards(settings.http))
        if settings.judge is not None:
            sources["judge"] = self._judge(settings.judge, Judge(settings.judge))
        return sources

    def _verifier(self, kind: str, arguments: Callable[[Response], Mapping[str, Any]]) -> Start:
        def start(responses: Sequence[Response]) -> Wait:
            futures = [self._submit(Call(kind, arguments(one))) for one in responses]
            return lambda: [future.result()[0] for future in futures]

        return start

    def _code(self, settings: CodeReward) -> Start:
        def call(one: Response) -> Call | Failed:
            try:
                tests = read_tests(one.label)
            except (ValueError, SyntaxError, RecursionError) as error:
                return Failed("unparsable", one_line(error))
            given = settings.model_dump(include={"timeout_s", "memory_mb", "partial"})
            arguments = {"completion": one.completion, "label": one.label, **given}
            return Call("code", arguments, limit_s=len(tests) * settings.timeout_s + _CODE_MARGIN_S)

        def start(responses: Sequence[Response]) -> Wait:
            calls = [call(one) for one in responses]
            futures = [one if isinstance(one, Failed) else self._submit(one) for one in calls]
            return lambda: [one if isinstance(one, Failed) else one.result()[0] for one in futures]

        return start

    def _function(self, settings: FunctionReward) -> Start:
        def submit(batch: Sequence[Response]) -> "Future[list[Outcome]]":
            arguments = {
                "queries": [one.query for one in batch],
                "prompts": [one.prompt for one in batch],
                "completions": [one.completion for one in batch],
                "labels": [one.label for one in batch],
            }
            return self._submit(Call("function", arguments, settings.name, len(batch)))

        def result(batch: Sequence[Response], outcomes: list[Outcome]) -> list[Outcome]:
            """A batch that failed as a whole is called one by one: the others are not at fault."""
            if len(batch) == 1 or not all(isinstance(one, Failed) for one in outcomes):
                return outcomes
            return [future.result()[0] for future in [submit([one]) for one in batch]]

        def start(responses: Sequence[Response]) -> Wait:
            size = settings.batch_size
            batches = [responses[at : at + size] for at in range(0, len(responses), size)]
            futures = [submit(batch) for batch in batches]
            parts = zip(batches, futures, strict=True)
            return lambda: [one for batch, future in parts for one in result(batch, future.result())]

        return start

    def _http(self, client: HttpRewards) -> Start:
        self._to_close.append(client)

        def start(responses: Sequence[Response]) -> Wait:
            assert self._loop is not None
            return self._loop.submit(client.score(responses)).result

        return start

    def _judge(self, settings: JudgeReward, judge: Judge) -> Start:
        """What the judge wrote is read in the sandbox: the pattern is the user's."""
        self._to_close.append(judge)
        given = {"pattern": settings.score_pattern, "low": settings.low, "high": settings.high}

        def start(responses: Sequence[Response]) -> Wait:
            assert self._loop is not None
            asked = self._loop.submit(judge.ask(responses))

            def wait() -> list[Outcome]:
                answers = [
                    one if isinstance(one, Failed) else self._submit(Call("read_score", {"text": one, **given}))
                    for one in asked.result()
                ]
                return [one if isinstance(one, Failed) else one.result()[0] for one in answers]

            return wait

        return start

    def _submit(self, call: Call) -> "Future[list[Outcome]]":
        assert self._sandbox is not None
        return self._sandbox.submit(call)


def _here(score: Callable[[Response], float]) -> Start:
    """For what takes the time of reading the response, whatever it holds."""

    def start(responses: Sequence[Response]) -> Wait:
        found: list[Outcome] = [Scored(score(one)) for one in responses]
        return lambda: found

    return start


def _setup(settings: RewardSettings) -> Setup | None:
    """What the sandbox's processes load; None where no source needs one."""
    functions = {
        one.name: {"path": str(Path(one.path).resolve()), "source": _text(one), "function": one.function}
        for one in settings.functions
    }
    modules = ["math_verify"] if settings.math else []
    modules += ["jsonschema"] if settings.json_schema is not None else []
    others = (settings.regex, settings.code, settings.judge)
    return Setup(functions, modules) if functions or modules or any(one is not None for one in others) else None


def _text(settings: FunctionReward) -> str:
    """Read once: a process that replaces another runs the same code."""
    try:
        return Path(settings.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"reward.functions: {settings.path} cannot be read: {error}; give the path of a Python file"
        ) from None


def read_schema(path: str) -> dict[str, Any]:
    """A JSON schema. Raises SettingsError for what is none."""
    from jsonschema import validators
    from jsonschema.exceptions import SchemaError

    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
        validators.validator_for(schema, default=validators.Draft202012Validator).check_schema(schema)
    except (OSError, ValueError, TypeError, SchemaError) as error:
        raise SettingsError(
            f"reward.json_schema.path: {path} is no JSON schema: {one_line(error)}; give a file with one"
        ) from None
    return schema


# -- failures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """kept: for each response whether its group is trained on. values: by source, of all that were scored.
    scores: likewise, what groups are filtered by."""

    kept: list[bool]
    values: list[dict[str, float]]
    scores: list[dict[str, float]]
    metrics: dict[str, float]


def settle(outcomes: Sequence[Mapping[str, Outcome]], group_ids: Sequence[int], settings: RewardSettings) -> Settled:
    """Applies the policy on failures. Raises RewardError where it is `fail` and there is one.

    A source of weight 0 is measured only: its failures are counted, and no group is dropped for them. Metrics, counts
    or means over the responses that have them: reward/failed, reward/dropped_groups, and for each source
    reward/<source>/failed/<reason> (where there are any) and reward/<source>/<extra>.
    """
    failures = [
        (group, name, one)
        for group, by_source in zip(group_ids, outcomes, strict=True)
        for name, one in by_source.items()
        if isinstance(one, Failed)
    ]
    bad = [(group, name, one) for group, name, one in failures if settings.weights[name]]
    if bad and settings.on_failure == "fail":
        _, name, first = bad[0]
        raise RewardError(
            f"{len(bad)} rewards failed, the first of source {name}: {first.reason}: {first.message}; mend it, or set "
            "reward.on_failure to retry or drop_group"
        )
    dropped = {group for group, _, _ in bad}
    counts = Counter(f"reward/{name}/failed/{one.reason}" for _, name, one in failures)
    scored = [{name: one for name, one in by.items() if isinstance(one, Scored)} for by in outcomes]
    return Settled(
        kept=[group not in dropped for group in group_ids],
        values=[{name: one.value for name, one in by.items()} for by in scored],
        scores=[{name: one.value if one.score is None else one.score for name, one in by.items()} for by in scored],
        metrics={
            "reward/failed": float(len(failures)),
            "reward/dropped_groups": float(len(dropped)),
            **_extras(scored),
            **{name: float(count) for name, count in counts.items()},
        },
    )


def _extras(scored: Sequence[Mapping[str, Scored]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for by_source in scored:
        for source, one in by_source.items():
            for name, value in one.extra.items():
                found.setdefault(f"reward/{source}/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}
