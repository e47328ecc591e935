"""PPO with a critic, and GRPO with dynamic sampling, are killed after a step, run again, and end in the bits of a run
that nobody disturbed. The KL coefficient adapts, running moments normalise rewards, a moving average is exported."""

import sys
from pathlib import Path

import pytest
from logged_metrics import check_logged

from rlhf_core.config.base import parse_settings
from rlhf_core.config.rl import PpoSettings

sys.path.insert(0, str(Path(__file__).parent))
from kill_trials import RL_STEPS, StageRun, write_demo_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

KILLED_AFTER, CHECKPOINT = 3, 2


@pytest.mark.parametrize(("algorithm", "ranks"), [("ppo", 1), ("grpo", 2)])
def test_a_killed_run_ends_in_the_bits_of_one_that_was_not_killed(tmp_path: Path, algorithm: str, ranks: int) -> None:
    model = write_demo_model(tmp_path / "model")
    killed = StageRun.prepare(tmp_path / "killed", algorithm, ranks, model)
    assert killed.run_and_kill(KILLED_AFTER) == CHECKPOINT
    straight = StageRun.prepare(tmp_path / "straight", algorithm, ranks, model)
    undisturbed = straight.run()

    killed.wait_for_lease()
    resumed = killed.run()
    assert killed.resumed_at() == [CHECKPOINT]
    assert resumed.key == undisturbed.key
    assert resumed.content_digest == undisturbed.content_digest
    metrics = straight.metrics(undisturbed)
    assert killed.metrics(resumed) == metrics
    check_logged(parse_settings(PpoSettings, straight.spec.settings), straight.lines(undisturbed, "metrics.jsonl"))
    generations = straight.lines(undisturbed, "generations.jsonl")
    assert killed.lines(resumed, "generations.jsonl") == generations
    assert len({row["step"] for row in generations}) == len([one for one in metrics if one["phase"] == "eval"])

    steps = [record for record in metrics if record["phase"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, RL_STEPS + 1))
    assert len({record["kl/coef"] for record in steps}) > 1
    assert len({record["policy/loss"] for record in steps[1:]}) == RL_STEPS - 1  # the last step's weights are exported
    if algorithm == "ppo":
        assert "policy/loss" not in steps[0]  # the critic's warm-up
        assert len({record["critic/loss"] for record in steps}) == RL_STEPS
    else:
        assert any(record["dynamic_sampling/rounds"] == 2 for record in steps)
