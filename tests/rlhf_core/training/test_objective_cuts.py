"""Gradient and loss of PRM, DPO, KTO and adapters do not depend on how a step was cut: against plain PyTorch.

test_cuts.py has the other objectives, benchmarks/cuts.py every combination.
"""

# pyright: reportMissingImports=false

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cut_kinds import BOUND, cut_step, errors, plain_step
from test_cuts import FACTORS, pairwise

pytestmark = pytest.mark.engines

KINDS = ["prm", "dpo", "kto", "sft, LoRA", "dpo, LoRA"]
# The second rank has an item less, and fills its last micro-batch with one that must count nowhere.
FILL = {"micro_batch_size": 1, "ranks": 2, "zero_stage": 2, "packing": False}
CASES = pairwise({**FACTORS, "kind": KINDS})
CASES += [case for case in ({"kind": kind, **FILL} for kind in KINDS) if case not in CASES]


@pytest.fixture(scope="module")
def plain(llama: str) -> Callable[[str], Any]:
    """(loss, gradient by name) of the plain computation, computed once."""
    return cache(lambda kind: plain_step(kind, llama))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_gradient_is_that_of_the_whole_batch(
    groups: Any, llama: str, plain: Callable[[str], Any], case: dict[str, Any]
) -> None:
    trainer = {name: value for name, value in case.items() if name != "kind"}
    found = errors(cut_step(groups[case["ranks"]], case["kind"], llama, trainer), plain(case["kind"]))
    assert found["gradient"] < BOUND
    assert found["loss"] < BOUND
