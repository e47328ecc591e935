"""Built-in verifiers: from a completion and a label to a score. Pure functions."""

import re

_MARK = re.compile(r"#+")


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
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", _MARK.split(text)[-1].strip())
