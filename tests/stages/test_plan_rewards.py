"""Files that decide what is rewarded are part of PPO's key, by their content."""

from pathlib import Path

import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import load_pipeline
from stages.plan import plan_pipeline


def ppo_key(project: Path, reward: str) -> str:
    settings = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", [f"ppo.reward={reward}"])
    return next(one.key.key for one in plan_pipeline(settings) if one.node == "ppo")


def test_a_reward_function_enters_by_its_content(project: Path, tmp_path: Path) -> None:
    for name, text in (("a.py", "one"), ("b.py", "one"), ("c.py", "two")):
        (tmp_path / name).write_text(text)
    one, same, other = (
        ppo_key(project, f"{{functions: [{{path: {tmp_path / name}}}]}}") for name in ("a.py", "b.py", "c.py")
    )
    assert one == same != other


def test_a_schema_enters_by_its_content(project: Path, tmp_path: Path) -> None:
    keys = []
    for name, text in (("a.json", "{}"), ("b.json", "{}"), ("c.json", '{"type": "object"}')):
        (tmp_path / name).write_text(text)
        keys.append(ppo_key(project, f"{{json_schema: {{path: {tmp_path / name}}}}}"))
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (
            "{functions: [{path: absent.py}]}",
            "ppo.reward.functions.function: file absent.py does not exist; give the path",
        ),
        (
            "{json_schema: {path: absent.json}}",
            "ppo.reward.json_schema.path: file absent.json does not exist; give the path",
        ),
    ],
)
def test_a_file_that_is_absent_is_refused_before_anything_runs(project: Path, reward: str, fault: str) -> None:
    with pytest.raises(SettingsError, match=fault):
        ppo_key(project, reward)


def test_limits_of_the_sandbox_are_no_part_of_the_key(project: Path) -> None:
    assert ppo_key(project, "{math: 1, sandbox: {workers: 7, timeout_s: 3}}") == ppo_key(project, "{math: 1}")
    assert ppo_key(project, "{math: 1, on_failure: fail}") != ppo_key(project, "{math: 1}")
