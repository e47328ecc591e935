"""Verifiers say the same in the main thread, in many threads at once, and in processes beside others that take the
cores: what arithmetic says. Cases are drawn; the truth is Python's own fractions."""

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from rlhf_core.config.rewards import SandboxSettings
from rlhf_core.rollout import verifiers
from rlhf_core.rollout.outcomes import Outcome, Scored
from rlhf_core.rollout.sandbox import Call, Sandbox, Setup

# Of numbers with a finite decimal expansion, and others.
DENOMINATORS = (1, 1, 2, 4, 5, 8, 3, 7, 12)
FRAMES = ("so it is \\boxed{%s}", "At first 17, but then\n$%s$", "1 + 1 = 2\n#### %s", "as $3 + 4 = 7$:\n\\boxed{%s}")


def written(number: Fraction) -> list[str]:
    """Ways to write a number."""
    sign, top, bottom = "-" if number < 0 else "", abs(number.numerator), number.denominator
    forms = [f"{sign}\\frac{{{top}}}{{{bottom}}}", f"{sign}\\frac{{{3 * top}}}{{{3 * bottom}}}"]
    forms.append(f"{sign}{top}" if bottom == 1 else f"{sign}{top}/{bottom}")
    if bottom == 1 and top >= 1000:
        forms.append(f"{sign}{top:,}")
    if (number * 1000).denominator == 1:
        forms.append(f"{float(number):.3f}")
    return forms


def draw(rng: random.Random) -> tuple[str, str, bool]:
    """(completion, label, whether their numbers are equal)."""
    right, other = (Fraction(rng.randint(-99, 4999), rng.choice(DENOMINATORS)) for _ in range(2))
    answer = right if rng.random() < 0.6 else other
    return rng.choice(FRAMES) % rng.choice(written(answer)), rng.choice(written(right)), answer == right


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Two processes beside two that take both cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        directory: Path = tmp_path_factory.mktemp("sandbox")
        with Sandbox(SandboxSettings(timeout_s=60), Setup(modules=["math_verify"]), directory) as made:
            yield made
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_equal_numbers_are_right_wherever_they_are_compared(sandbox: Sandbox) -> None:
    rng = random.Random(0)
    drawn = [draw(rng) for _ in range(60)]
    assert 0.4 < sum(equal for *_, equal in drawn) / len(drawn) < 0.8
    calls = [Call("math", {"completion": completion, "label": label}) for completion, label, _ in drawn]
    waiting = [sandbox.submit(call) for call in calls]
    with ThreadPoolExecutor(6) as pool:
        threads = list(pool.map(lambda case: verifiers.math(*case[:2]), drawn))
    here = [verifiers.math(completion, label) for completion, label, _ in drawn]
    processes = [one.result()[0] for one in waiting]
    for number, (completion, label, equal) in enumerate(drawn):
        expected: Outcome = Scored(float(equal), extra={"unparsable": 0.0})
        found = (here[number], threads[number], processes[number])
        assert found == (expected, expected, expected), (completion, label)
