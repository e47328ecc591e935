"""`plan_only`: the flow makes the table and nothing else."""

from pathlib import Path

import pytest

from flows import sft_rm_ppo as flow_module
from rlhf_core.config.pipeline import read_pipeline

DEMO = Path(__file__).parents[2] / "deployments" / "pipelines" / "demo.yaml"


def test_plan_only_publishes_the_table_and_completes_with_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    published: dict[str, str] = {}

    def keep(markdown: str, key: str, description: str) -> None:
        published[key] = markdown

    monkeypatch.setattr(flow_module, "create_markdown_artifact", keep)
    values = read_pipeline(DEMO) | {"set": [f"run.store={tmp_path}/store"], "plan_only": True}
    state = flow_module.sft_rm_ppo.fn(**values)
    assert state.is_completed()
    assert state.message == "plan only: 9 to run, 0 resumed, 0 reused"
    rows = [line.split(" | ")[0] for line in published["plan"].splitlines()[2:11]]
    assert rows[-4:] == ["| sft", "| rm", "| ppo", "| evaluate"]
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_settings_fails_the_run(tmp_path: Path):
    values = read_pipeline(DEMO) | {"set": ["ppo.stepz=1"], "plan_only": True}
    state = flow_module.sft_rm_ppo.fn(**values)
    assert state.is_failed()
    assert state.message == "ppo.stepz: unknown setting; did you mean 'steps'?"
