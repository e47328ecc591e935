"""Built-in verifiers: from a completion and a label to a score. Pure functions, the same in any thread or process.

None limits its own time: what may take long on a pathological answer (`math`, `regex`, `json_schema`) is called in the
sandbox, which does.
"""

import json
import logging
import re
from collections.abc import Mapping, Set
from typing import Any

from rlhf_core.rollout.outcomes import Failed, Outcome, Scored, one_line

_MARK = re.compile(r"#+")
# Possessive, so that a long line is read once.
_FENCED = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)


def exact(completion: str, label: str) -> float:
    """1.0 if what follows the answer mark (`#`, or `####` as in GSM8K) equals the label's answer, else 0.0.

    The completion must have exactly one mark: one that gives several answers has given none. The label is the answer,
    or a worked solution with the answer after its last mark. Spaces around an answer and thousands separators within
    it do not count. No partial credit.
    """
    marks = list(_MARK.finditer(completion))
    if len(marks) != 1:
        return 0.0
    return float(_answer(completion) == _answer(label))


def _answer(text: str) -> str:
    return _plain(_MARK.split(text)[-1])


def _plain(answer: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer.strip())


def answer(completion: str, verifier: str) -> str:
    r"""What a vote counts: what stands behind the last answer mark, for `math` `####` or else the last `\boxed{}`;
    the whole completion where there is none. Written as `exact` compares it."""
    if verifier == "exact":
        return _answer(completion)
    if "####" in completion:
        return _plain(_behind_mark(completion))
    _, box, rest = completion.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return _plain(rest[:at])
    return _plain(completion)


def math(completion: str, label: str) -> Outcome:
    r"""1.0 if the completion's answer is mathematically equal to the label's (math-verify), else 0.0.

    An answer stands behind the last `####`, else in `\boxed{}`, in LaTeX or as a plain expression, wherever math-verify
    finds it. A label without a mark, box or dollar sign is the answer itself. A completion without an answer scores 0
    with extra unparsable 1; a label without one is a failure.
    """
    import math_verify
    from sympy.core import random as sympy_random

    # math-verify warns once that its own limit, a signal that only the main thread can have, is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # sympy compares expressions at random points: the same ones each time.
    sympy_random.seed(0)
    gold = math_verify.parse(_as_latex(_behind_mark(label)), parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        return Failed("unparsable", f"math finds no answer in the label {one_line(label, 80)!r}")
    answer = math_verify.parse(_behind_mark(completion), parsing_timeout=None)  # type: ignore[arg-type]
    if not answer:
        return Scored(0.0, extra={"unparsable": 1.0})
    equal = math_verify.verify(gold, answer, timeout_seconds=None)
    return Scored(float(equal), extra={"unparsable": 0.0})


def _behind_mark(text: str) -> str:
    return text.rpartition("####")[2]


def _as_latex(answer: str) -> str:
    return answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer.strip()}}}"


def regex(completion: str, label: str, *, pattern: str, compare: bool) -> Outcome:
    """1.0 if the pattern is found, else 0.0. compare: its last match's group 1 must equal the label, blanks trimmed."""
    found = list(re.finditer(pattern, completion))
    if not compare:
        return Scored(float(bool(found)))
    return Scored(float(bool(found) and (found[-1][1] or "").strip() == label.strip()))


def json_schema(completion: str, *, schema: Mapping[str, Any]) -> Outcome:
    """1.0 if the completion is JSON that the schema (draft 2020-12 unless it names another) admits, else 0.0.

    Of a completion with fenced blocks, the last one is read. What is no JSON scores 0 with extra unparsable 1.
    """
    from jsonschema import validators

    blocks = fenced_blocks(completion, {"", "json"})
    try:
        value = json.loads(blocks[-1] if blocks else completion)
    except (json.JSONDecodeError, RecursionError):
        return Scored(0.0, extra={"unparsable": 1.0})
    validator = validators.validator_for(schema, default=validators.Draft202012Validator)(schema)
    return Scored(float(validator.is_valid(value)), extra={"unparsable": 0.0})


def fenced_blocks(text: str, languages: Set[str]) -> list[str]:
    """What stands between lines of three backticks, where one of `languages` (lower case) is named, or "" for none."""
    return [block for language, block in _FENCED.findall(text) if language.lower() in languages]


def length(completion: str, *, unit: str, low: int, high: int | None) -> float:
    """1.0 for a completion of low to high units, both included, else 0.0. unit: "characters" or "words"."""
    size = len(completion) if unit == "characters" else len(completion.split())
    return float(low <= size and (high is None or size <= high))
