"""Files of users: the forms of functions and of results that are taken."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_core.rollout.outcomes import Failed, Scored, finite
from rlhf_core.rollout.reward_functions import load_function, read_result, read_score


def call(path: Path, source: str, function: str = "reward_func") -> list:
    found = load_function(str(path), source, function)
    return found(["q1 c1", "q2 c2"], ["q1", "q2"], ["c1", "c2"], ["7", "8"])


def test_a_function_of_lists(tmp_path: Path) -> None:
    source = "def reward_func(queries, prompts, labels, **more):\n    return {'rewards': [float(l) for l in labels]}"
    assert call(tmp_path / "a.py", source) == [Scored(7.0), Scored(8.0)]


def test_a_function_of_a_completion_and_a_label(tmp_path: Path) -> None:
    source = "def judge(completion, label, scale=2):\n    return (completion == 'c1') * scale"
    assert call(tmp_path / "a.py", source, "judge") == [Scored(2.0), Scored(0.0)]


def test_a_file_imports_what_lies_beside_it_and_may_define_dataclasses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_reward.py").write_text("VALUE = 3")
    source = (
        "from __future__ import annotations\nimport dataclasses\nfrom beside_reward import VALUE\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\n"
        "def reward_func(completion, label): return A(VALUE).x"
    )
    assert call(tmp_path / "a.py", source) == [Scored(3.0), Scored(3.0)]


@pytest.mark.parametrize(
    "rewards",
    [[0.0, 1.0], (0, 1), np.array([0.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([[0.0], [1.0]]), [[0.0], [1.0]]],
)
def test_rewards_are_lists_arrays_or_tensors(rewards: object) -> None:
    assert read_result({"rewards": rewards}, 2) == [Scored(0.0), Scored(1.0)]


def test_rewards_are_a_list_of_tensors_or_one_tensor() -> None:
    assert read_result({"rewards": [torch.tensor(0.5), torch.tensor([1.0])]}, 2) == [Scored(0.5), Scored(1.0)]
    assert read_result({"rewards": torch.tensor(0.5)}, 1) == [Scored(0.5)]


def test_scores_and_logs_belong_to_their_responses() -> None:
    logs = {"length": torch.tensor([3, 4]), "version": 2, "sometimes": [None, 1.0]}
    found = read_result({"rewards": [0.0, 1.0], "scores": np.array([0.0, 0.5]), "extra_logs": logs}, 2)
    assert found == [
        Scored(0.0, 0.0, {"length": 3.0, "version": 2.0}),
        Scored(1.0, 0.5, {"length": 4.0, "version": 2.0, "sometimes": 1.0}),
    ]


def test_a_null_is_a_failure_and_no_zero() -> None:
    assert read_result({"rewards": [None, 0.0]}, 2) == [Failed("error", "the reward is null"), Scored(0.0)]


@pytest.mark.parametrize(
    "result",
    [None, [1.0, 2.0], {}, {"rewards": [1.0]}, {"rewards": 1.0}, {"rewards": [1.0, 2.0], "scores": [1.0]}],
)
def test_a_result_of_another_form_is_refused(result: object) -> None:
    with pytest.raises(ValueError, match=r"return a dict with `rewards`|has 1 numbers for 2 responses"):
        read_result(result, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("Score: 7", 7.0), ("Score: 1\nNo: score:  2.5", 2.5), ("score: -1", None), ("Score: 11", None), ("seven", None)],
)
def test_the_last_score_within_bounds_is_a_judges(text: str, value: float | None) -> None:
    found = read_score(text, r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", 0.0, 10.0)
    assert (found.value if isinstance(found, Scored) else None) == value
    assert isinstance(found, Scored) or found.reason == "unparsable"


@pytest.mark.parametrize("said", ["score nan", "score inf", "score -1e400", "score 7e", "score"])
def test_a_score_that_is_no_number_is_unparsable(said: str) -> None:
    found = finite(read_score(said, r"score ?(\S*)", None, None))
    assert isinstance(found, Failed)
    assert found.reason == "unparsable"


def test_the_sandboxs_process_loads_in_little_time_and_memory() -> None:
    script = (
        "import sys, rlhf_core.rollout.sandbox_worker; print(*{'torch', 'numpy', 'pydantic', 'sympy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
