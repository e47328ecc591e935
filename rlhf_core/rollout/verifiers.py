"""Built-in verifiers: from a completion and a label to a score. Pure functions."""

import re

_ANSWER = re.compile(r"#+")


def exact(completion: str, label: str) -> float:
    """1.0 if what follows the answer mark (`#`, or `####` as in GSM8K) equals the label, else 0.0.

    There must be exactly one mark: a completion that gives several answers has given none. Spaces around the answer
    and thousands separators within it do not count. No partial credit.
    """
    marks = list(_ANSWER.finditer(completion))
    if len(marks) != 1:
        return 0.0
    return float(_normal(completion[marks[0].end() :]) == _normal(label))


def _normal(answer: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer.strip())
