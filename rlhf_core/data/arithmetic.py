"""The demo's task: sums of whole numbers with worked steps, one row a dict that JSON can hold.

A problem reads `3+4+5=`, its solution `3+4=7,7+5=12#12`: the running sum step by step, separated by commas, and the
answer after `#`. Every row set is a pure function of its `ArithmeticSpec` and of `GENERATOR_VERSION`.

Train and held-out problems are split by a hash of the *sorted* terms: `3+4+5=` and `5+3+4=` fall on the same side, so
a held-out problem is not a reordered training problem. The split depends on `split_seed` alone, so row sets of
different seeds share it.

Wrong solutions have the form of right ones (same number of steps, answer repeated after `#`) and are of four kinds:

- `off_by_one`: the last step's value is one too large or too small;
- `lost_carry`: the last step's units are right and its tens are off by one, up or down;
- `skipped_term`: a term is left out, and another term of the problem stands in its place;
- `carried_on`: an earlier step is off by one or by a carry, and the steps after it go on from the wrong value.

Kinds are drawn evenly from those that the problem admits, but so that each character's count over all wrong solutions
of a row set stays within a few of its count over the right ones: neither length nor character counts tell them apart.
"""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

GENERATOR_VERSION = 1  # part of the data's fingerprint: raise it when any row of any spec changes

Split = Literal["train", "heldout"]
Terms = tuple[int, ...]
Row = dict[str, Any]

_MAX_PROBLEMS = 2_000_000  # all problems are listed in memory
_COUNT_SLACK = 8  # characters; a wrong solution changes a character's count by at most 6 or so


@dataclass(frozen=True)
class ArithmeticSpec:
    """What a row set is made from.

    rows: number of rows; None gives every problem of the split once. Where rows exceed the problems, sft, pair and
        step rows pass over the problems again, in a new order; prompt rows refuse.
    max_number: terms are 0 to max_number. terms: how many terms a problem may have, each at least 2.
    """

    seed: int
    rows: int | None = None
    max_number: int = 9
    terms: tuple[int, ...] = (2, 3)
    split: Split = "train"
    split_seed: int = 0
    heldout_fraction: float = 0.2

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows is {self.rows}; give at least 1, or None for every problem of the split")
        if self.max_number < 1:
            raise ValueError(f"max_number is {self.max_number}; give at least 1")
        if not self.terms or min(self.terms) < 2 or len(set(self.terms)) != len(self.terms):
            raise ValueError(f"terms is {self.terms}; give one or more different numbers, each at least 2")
        if self.split not in ("train", "heldout"):
            raise ValueError(f"split is {self.split!r}; give 'train' or 'heldout'")
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction is {self.heldout_fraction}; give a number between 0 and 1")
        count = sum((self.max_number + 1) ** k for k in self.terms)
        if count > _MAX_PROBLEMS:
            raise ValueError(
                f"max_number {self.max_number} with terms {self.terms} makes {count} problems; "
                f"at most {_MAX_PROBLEMS} are allowed: lower max_number or terms"
            )


@dataclass(frozen=True)
class Wrong:
    """A wrong solution: its kind, its steps (`"".join(steps)` is the text), the index of the first wrong step."""

    kind: str
    steps: tuple[str, ...]
    first_wrong: int


def sft_rows(spec: ArithmeticSpec) -> list[Row]:
    """Rows {"prompt": str, "response": str}: problem and right solution."""
    return [{"prompt": problem(t), "response": solution(t)} for t in _passes(spec, _rng(spec, "sft"))]


def pair_rows(spec: ArithmeticSpec) -> list[Row]:
    """Rows {"prompt": str, "chosen": str, "rejected": str}: right and wrong solution of one problem."""
    rng = _rng(spec, "pairs")
    balance = _Balance()
    rows = []
    for terms in _passes(spec, rng):
        rejected = "".join(balance.draw(terms, spec.max_number, rng).steps)
        rows.append({"prompt": problem(terms), "chosen": solution(terms), "rejected": rejected})
    return rows


def step_rows(spec: ArithmeticSpec) -> list[Row]:
    """Rows {"prompt": str, "steps": [str], "labels": [bool]} for a process reward model; every second row is right.

    The steps joined without a separator are the response: a comma ends every step but the last, which ends with `#`
    and the answer. A label is True before the first wrong step and False from it on: a step that computes rightly
    from a wrong value is False too, since no correct solution continues from there.
    """
    rng = _rng(spec, "steps")
    balance = _Balance()
    rows = []
    for i, terms in enumerate(_passes(spec, rng)):
        if i % 2 == 0:
            steps, first_wrong = _written(terms), len(terms)
        else:
            wrong = balance.draw(terms, spec.max_number, rng)
            steps, first_wrong = wrong.steps, wrong.first_wrong
        labels = [k < first_wrong for k in range(len(steps))]
        rows.append({"prompt": problem(terms), "steps": list(steps), "labels": labels})
    return rows


def labelled_rows(spec: ArithmeticSpec) -> list[Row]:
    """Rows {"prompt": str, "response": str, "label": bool}: a solution, and whether it is right; every second is."""
    return [
        {"prompt": row["prompt"], "response": "".join(row["steps"]), "label": all(row["labels"])}
        for row in step_rows(spec)
    ]


def prompt_rows(spec: ArithmeticSpec) -> list[Row]:
    """Rows {"prompt": str, "label": str}: problem and true answer, no problem twice.

    Raises ValueError where the split has fewer problems than spec.rows.
    """
    available = len(problems(spec))
    if spec.rows is not None and spec.rows > available:
        raise ValueError(
            f"rows is {spec.rows}, but the {spec.split} split has {available} problems; "
            f"give at most {available}, or None for all of them"
        )
    return [{"prompt": problem(t), "label": str(sum(t))} for t in _passes(spec, _rng(spec, "prompts"))]


def problem(terms: Terms) -> str:
    """`3+4+5=` for (3, 4, 5)."""
    return "+".join(map(str, terms)) + "="


def solution(terms: Terms) -> str:
    """`3+4=7,7+5=12#12` for (3, 4, 5)."""
    return "".join(_written(terms))


def problems(spec: ArithmeticSpec) -> list[Terms]:
    """Every problem of the spec's split, in lexical order for each number of terms."""
    numbers = range(spec.max_number + 1)
    every = itertools.chain.from_iterable(itertools.product(numbers, repeat=k) for k in spec.terms)
    chosen = [t for t in every if _is_heldout(t, spec) == (spec.split == "heldout")]
    if not chosen:
        raise ValueError(
            f"no problem falls into the {spec.split} split with max_number {spec.max_number}, terms {spec.terms}, "
            f"heldout_fraction {spec.heldout_fraction}; raise max_number or change heldout_fraction"
        )
    return chosen


def wrong_solutions(terms: Terms, max_number: int) -> list[Wrong]:
    """Every wrong solution of the four kinds (module docstring); never empty, each answer differs from the true one."""
    last = len(terms) - 2
    found = [Wrong("off_by_one", _written(terms, last, d), last) for d in (-1, 1) if _fits(terms, last, d, max_number)]
    found += [
        Wrong("lost_carry", _written(terms, last, d), last) for d in (-10, 10) if _fits(terms, last, d, max_number)
    ]
    for out, instead in itertools.permutations(range(len(terms)), 2):
        if terms[out] != terms[instead]:
            shown = (*terms[:out], terms[instead], *terms[out + 1 :])
            found.append(Wrong("skipped_term", _written(shown), max(out - 1, 0)))
    for step, d in itertools.product(range(last), (-10, -1, 1, 10)):
        if _fits(terms, step, d, max_number):
            found.append(Wrong("carried_on", _written(terms, step, d), step))
    return found


def _written(terms: Terms, slip_at: int = -1, slip: int = 0) -> tuple[str, ...]:
    """The steps as text; the value of step `slip_at` is off by `slip` and carried on."""
    steps, value = [], terms[0]
    for i, term in enumerate(terms[1:]):
        total = value + term + (slip if i == slip_at else 0)
        end = f"#{total}" if i == len(terms) - 2 else ","
        steps.append(f"{value}+{term}={total}{end}")
        value = total
    return tuple(steps)


def _fits(terms: Terms, step: int, slip: int, max_number: int) -> bool:
    """Whether the slipped value is one that a right solution may show at this step: a value out of range would tell."""
    return 0 <= sum(terms[: step + 2]) + slip <= max_number * (step + 2)


class _Balance:
    """Draws wrong solutions evenly by kind, keeping every character's total count over wrong minus right near 0."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()

    def draw(self, terms: Terms, max_number: int, rng: random.Random) -> Wrong:
        right = Counter(solution(terms))
        by_kind: dict[str, list[Wrong]] = {}
        for wrong in wrong_solutions(terms, max_number):
            by_kind.setdefault(wrong.kind, []).append(wrong)
        kinds = list(by_kind)
        rng.shuffle(kinds)
        candidates = [rng.choice(by_kind[kind]) for kind in kinds]
        after = [self._totals_after(right, Counter("".join(wrong.steps))) for wrong in candidates]
        worst = [max(abs(total) for total in totals.values()) for totals in after]
        picked = next((i for i, total in enumerate(worst) if total <= _COUNT_SLACK), worst.index(min(worst)))
        self._totals = after[picked]
        return candidates[picked]

    def _totals_after(self, right: Counter[str], wrong: Counter[str]) -> Counter[str]:
        totals = self._totals.copy()
        totals.update(wrong)
        totals.subtract(right)
        return totals


def _is_heldout(terms: Terms, spec: ArithmeticSpec) -> bool:
    text = f"{spec.split_seed}:{'+'.join(map(str, sorted(terms)))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < spec.heldout_fraction * 2**64


def _rng(spec: ArithmeticSpec, purpose: str) -> random.Random:
    return random.Random(f"{purpose}:{spec.split}:{spec.seed}")


def _passes(spec: ArithmeticSpec, rng: random.Random) -> Iterator[Terms]:
    """spec.rows problems in shuffled passes: none comes again before all have come."""
    every = problems(spec)
    left = len(every) if spec.rows is None else spec.rows
    while left > 0:
        for terms in rng.sample(every, len(every))[:left]:
            yield terms
            left -= 1
