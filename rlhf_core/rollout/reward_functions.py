"""Reward functions of the user's: how a file becomes a function, and what it returned outcomes. Runs in the sandbox.

Two forms are taken, told apart by the number of parameters without a default:

- `reward_func(queries, prompts, labels)`: lists of one length, to a dict with `rewards` and, where wanted, `scores`
  (what groups are filtered by) and `extra_logs` (name -> numbers for the metrics). Lists, numpy arrays and tensors.
- `(completion, label) -> float`.
"""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_core.rollout.outcomes import Failed, Outcome, Scored, one_line


@dataclass(frozen=True)
class UserFunction:
    """batched: of the first form. A plain one is called once for each response."""

    function: Callable[..., Any]
    batched: bool

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], completions: Sequence[str], labels: Sequence[str]
    ) -> list[Outcome]:
        if self.batched:
            return read_result(self.function(list(queries), list(prompts), list(labels)), len(queries))
        given = zip(completions, labels, strict=True)
        return [Scored(_number(self.function(completion, label))) for completion, label in given]


def load_function(path: str, source: str, function: str) -> UserFunction:
    """The function of a file whose text is `source`. Raises ValueError for one of another form."""
    name = f"reward_file_{re.sub(r'[^0-9A-Za-z]', '_', Path(path).stem)}"
    module = ModuleType(name)
    module.__file__ = path
    # Dataclasses and pickling look the module up; what lies beside the file can be imported.
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))
    exec(compile(source, path, "exec"), module.__dict__)
    if function not in vars(module):
        raise ValueError(f"{path} has no function {function}; define it, or name another in `function`")
    found = vars(module)[function]
    return UserFunction(found, batched=_parameters(path, function, found) == 3)


def _parameters(path: str, function: str, found: Any) -> int:
    parameters = inspect.signature(found).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    if len(required) not in (2, 3) or inspect.iscoroutinefunction(found):
        raise ValueError(
            f"{path}: {function} takes ({', '.join(required)}); give (queries, prompts, labels) -> dict or "
            "(completion, label) -> float, not async"
        )
    return len(required)


def read_result(result: Any, size: int) -> list[Outcome]:
    """What a `reward_func` returned for `size` responses. Raises ValueError for what has another form."""
    if not isinstance(result, dict) or "rewards" not in result:
        raise ValueError(f"the result is {one_line(repr(result), 80)}; return a dict with `rewards`")
    rewards = _numbers("rewards", result["rewards"], size)
    scores = _numbers("scores", result["scores"], size) if result.get("scores") is not None else [None] * size
    logs = {str(name): _numbers(name, given, size) for name, given in (result.get("extra_logs") or {}).items()}
    return [_outcome(rewards[i], scores[i], {name: given[i] for name, given in logs.items()}) for i in range(size)]


def _outcome(reward: float | None, score: float | None, extra: dict[str, float | None]) -> Outcome:
    if reward is None:
        return Failed("error", "the reward is null")
    return Scored(reward, score, {name: value for name, value in extra.items() if value is not None})


def _numbers(name: str, given: Any, size: int) -> list[float | None]:
    """One number for each response, None where there is none; a single number is that of all."""
    plain = given if isinstance(given, list | tuple | int | float) else given.tolist()
    if isinstance(plain, int | float):
        plain = [plain] * size if name != "rewards" or size == 1 else [plain]
    if len(plain) != size:
        raise ValueError(f"{name} has {len(plain)} numbers for {size} responses")
    return [None if one is None else _number(one) for one in plain]


def _number(value: Any) -> float:
    """Of a number, or of a list or tensor that holds one."""
    if isinstance(value, int | float):
        return float(value)
    inner = value if isinstance(value, list | tuple) else value.tolist()
    if isinstance(inner, list | tuple):
        (inner,) = inner
    return float(inner)


def read_score(text: str, pattern: str, low: float | None, high: float | None) -> Outcome:
    """The number in group 1 of the pattern's last match in a judge's answer, between low and high."""
    found = list(re.finditer(pattern, text))
    try:
        score = float(found[-1][1])
    except (IndexError, TypeError, ValueError):
        return Failed("unparsable", f"no score in the judge's answer {one_line(text, 120)!r}")
    if (low is not None and score < low) or (high is not None and score > high):
        return Failed("unparsable", f"the judge's score {score} is outside {low} to {high}")
    return Scored(score)
