"""Settings of rewards: the sources, their weights, and what becomes of a response that a source could not score."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings

Weight = Annotated[float, Field(description="Factor of the value in the reward; 0: measured only.")]
NamedVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class RegexReward(Settings):
    """1 if a pattern is found in the response, else 0."""

    pattern: str = Field(min_length=1, description="Python regular expression, searched for.")
    compare: bool = Field(default=False, description="Group 1 of the last match must equal the label.")
    weight: Weight = 1.0

    @model_validator(mode="after")
    def _compiles(self) -> "RegexReward":
        _check_pattern("pattern", self.pattern, groups=int(self.compare))
        return self


class JsonSchemaReward(Settings):
    """1 if the response, or its last fenced block, is JSON that a schema admits, else 0."""

    path: Annotated[str, Neutral] = Field(description="JSON file with the schema; its SHA-256 is in the key.")
    weight: Weight = 1.0


class LengthReward(Settings):
    """1 if the response is between two lengths, else 0."""

    low: int = Field(default=0, ge=0, description="Shortest.")
    high: int | None = Field(default=None, ge=0, description="Longest; null: no bound.")
    unit: Literal["characters", "words"] = Field(default="characters", description="What is counted.")
    weight: Weight = 1.0

    @model_validator(mode="after")
    def _bounds(self) -> "LengthReward":
        if self.high is not None and self.high < self.low:
            raise ValueError(f"high {self.high} is below low {self.low}; swap them")
        return self


class CodeReward(Settings):
    """Runs the response's code against the tests in its label: 1 if all pass, else 0."""

    timeout_s: float = Field(default=5.0, gt=0, description="Longest run of one test; longer is a failed test.")
    memory_mb: int = Field(default=512, ge=64, description="Address space of one test; more is a failed test.")
    partial: bool = Field(default=False, description="The share of tests that pass instead of 1 or 0.")
    weight: Weight = 1.0


class FunctionReward(Settings):
    """A Python function of the user's, in a process of its own."""

    path: Annotated[str, Neutral] = Field(description="Python file; its SHA-256 is in the key.")
    function: str = Field(default="reward_func", description="Its name in the file.")
    name: str = Field(default="function", pattern=r"^[a-z][a-z0-9_]*$", description="Its name in metrics.")
    batch_size: int = Field(
        default=1, gt=0, description="Responses that a reward_func gets in one call; a call that fails is split."
    )
    weight: Weight = 1.0


class HttpReward(Settings):
    """A reward service in OpenRLHF's protocol."""

    urls: tuple[str, ...] = Field(min_length=1, description="Endpoints of one service, used in turn.")
    batch_size: Annotated[int, Neutral] = Field(default=32, gt=0, description="Responses in a request.")
    concurrency: Annotated[int, Neutral] = Field(default=8, gt=0, description="Requests under way at once.")
    timeout_s: Annotated[float, Neutral] = Field(default=180.0, gt=0, description="Longest request, all of it.")
    attempts: Annotated[int, Neutral] = Field(default=5, gt=0, description="Tries of a request, with back-off.")
    token_env: Annotated[NamedVariable | None, Neutral] = Field(
        default=None, description="Environment variable with the bearer token."
    )
    weight: Weight = 1.0

    @model_validator(mode="after")
    def _urls(self) -> "HttpReward":
        for url in self.urls:
            _check_url("urls", url)
        return self


class JudgeReward(Settings):
    """A model behind an OpenAI-compatible endpoint that writes a score."""

    url: str = Field(description="Base URL, up to and with /v1.")
    model: str = Field(min_length=1, description="The model's name there.")
    template: str = Field(description="What it is asked, with {response} and, where wanted, {prompt} and {label}.")
    score_pattern: str = Field(
        default=r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", description="Group 1 of the last match in its answer is the score."
    )
    low: float | None = Field(default=None, description="Scores below are unparsable.")
    high: float | None = Field(default=None, description="Scores above are unparsable.")
    temperature: float = Field(default=0.0, ge=0, description="Of its sampling.")
    max_tokens: int = Field(default=512, gt=0, description="Longest answer.")
    concurrency: Annotated[int, Neutral] = Field(default=16, gt=0, description="Requests under way at once.")
    timeout_s: Annotated[float, Neutral] = Field(default=120.0, gt=0, description="Longest request, all of it.")
    attempts: Annotated[int, Neutral] = Field(default=4, gt=0, description="Tries of a request, with back-off.")
    key_env: Annotated[NamedVariable | None, Neutral] = Field(
        default=None, description="Environment variable with the API key."
    )
    weight: Weight = 1.0

    @model_validator(mode="after")
    def _readable(self) -> "JudgeReward":
        _check_url("url", self.url)
        _check_pattern("score_pattern", self.score_pattern, groups=1)
        if "{response}" not in self.template:
            raise ValueError("template does not hold {response}, so the judge would not see what it judges; add it")
        return self


class SandboxSettings(Settings):
    """Processes in which functions and those verifiers run that a response could stall."""

    workers: Annotated[int, Neutral] = Field(default=2, gt=0, description="Processes.")
    timeout_s: Annotated[float, Neutral] = Field(default=10.0, gt=0, description="Longest call; then it is ended.")
    memory_mb: Annotated[int, Neutral] = Field(
        default=2048, ge=128, description="Resident memory of a process and its children; above it is ended."
    )
    start_timeout_s: Annotated[float, Neutral] = Field(default=120.0, gt=0, description="Longest start.")
    environment: Annotated[tuple[NamedVariable, ...], Neutral] = Field(
        default=(), description="Variables of the driver's environment that functions see, beside PATH and the like."
    )


class RewardSettings(Settings):
    """Weighted sum of the sources' values, given at the last token. `exact` is measured at weight 0 too."""

    rm: float = Field(
        default=0.0, description="Weight of the reward model's score, normalised by its held-out mean and std."
    )
    prm: float = Field(
        default=0.0, description="Weight of the process reward model's verdict on the steps, a probability."
    )
    prm_aggregate: Literal["min", "mean", "last", "product"] = Field(
        default="min", description="How the probabilities that the steps are right become one."
    )
    exact: float = Field(
        default=0.0, description="Weight of the exact verifier: 1 if the answer equals the label, else 0."
    )
    math: float = Field(
        default=0.0, description="Weight of math-verify: 1 if the answer is mathematically the label's, else 0."
    )
    regex: RegexReward | None = Field(default=None, description="A pattern in the response.")
    json_schema: JsonSchemaReward | None = Field(default=None, description="JSON of a given form.")
    length: LengthReward | None = Field(default=None, description="Bounds of the response's length.")
    code: CodeReward | None = Field(default=None, description="The response's code against the label's tests.")
    functions: tuple[FunctionReward, ...] = Field(default=(), description="Python functions.")
    http: HttpReward | None = Field(default=None, description="A reward service.")
    judge: JudgeReward | None = Field(default=None, description="A judge model.")
    on_failure: Literal["retry", "drop_group", "fail"] = Field(
        default="drop_group",
        description="For a response that a source could not score. retry: scored again, and then as drop_group; "
        "drop_group: its group is not trained on; fail: the stage ends.",
    )
    retries: int = Field(default=2, gt=0, description="How often on_failure retry scores again.")
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings, description="Processes for functions.")

    @property
    def weights(self) -> dict[str, float]:
        """Source -> weight, of every source that is measured."""
        weights = {"rm": self.rm, "prm": self.prm, "math": self.math}
        weights = {name: weight for name, weight in weights.items() if weight} | {"exact": self.exact}
        sections = {name: getattr(self, name) for name in _SECTIONS}
        weights |= {name: section.weight for name, section in sections.items() if section is not None}
        return weights | {function.name: function.weight for function in self.functions}

    @model_validator(mode="after")
    def _names(self) -> "RewardSettings":
        taken = {"rm", "prm", "exact", "math", "failed", "dropped_groups", *_SECTIONS}
        for function in self.functions:
            if function.name in taken:
                raise ValueError(
                    f"functions: the name {function.name} is taken; give each a name of its own, other than "
                    f"{', '.join(sorted(taken - {function.name}))}"
                )
            taken.add(function.name)
        return self

    @model_validator(mode="after")
    def _some_reward(self) -> "RewardSettings":
        if not any(self.weights.values()):
            raise ValueError("every weight is 0, so nothing would be rewarded; give rm, prm, exact or another a weight")
        return self


_SECTIONS = ("regex", "json_schema", "length", "code", "http", "judge")


def _check_pattern(setting: str, pattern: str, groups: int) -> None:
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{setting} {pattern!r} is no regular expression: {error}") from None
    if found < groups:
        raise ValueError(f"{setting} {pattern!r} has no group; put parentheses around what is read")


def _check_url(setting: str, url: str) -> None:
    if not re.match(r"https?://[^/\s]", url):
        raise ValueError(f"{setting} {url!r} is no http or https URL; give one such as http://host:5000/get_reward")
    if re.match(r"https?://[^/?#]*@", url):
        raise ValueError(
            f"{setting}: a URL with a user or password in it would be kept with the run; put a token into an "
            "environment variable, and name that in token_env or key_env"
        )
