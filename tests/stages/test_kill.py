"""Each supervised stage is killed at a random step, run again, and ends in the bits of a run that nobody disturbed."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kept_ranks
from kill_trials import SAVE_STEPS, STAGES, STEPS, StageRun, write_demo_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SEED = 20
RANKS = 2


def kill_steps(seed: int) -> dict[str, int]:
    """The last step of each stage's first driver: before the first training checkpoint for one of them, else after."""
    rng = random.Random(seed)
    early = rng.choice(STAGES)
    return {
        stage: rng.randint(1, SAVE_STEPS - 1) if stage == early else rng.randint(SAVE_STEPS + 1, STEPS - 1)
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    made = kept_ranks.new_ranks(RANKS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_ends_in_the_bits_of_one_that_was_not_killed(
    ranks: Any, model: Path, tmp_path: Path, stage: str
) -> None:
    step = kill_steps(SEED)[stage]
    killed = StageRun.prepare(tmp_path / "killed", stage, RANKS, model)
    newest = killed.run_and_kill(step)
    print(f"{stage} was killed after step {step}; its newest training checkpoint is of step {newest}")
    assert newest is not None or step <= SAVE_STEPS

    straight = StageRun.prepare(tmp_path / "straight", stage, RANKS, model)
    with kept_ranks.instead_of_ray(ranks):
        undisturbed = straight.run_here()

    killed.wait_for_lease()
    resumed = killed.run()
    assert killed.resumed_at() == ([] if newest is None else [newest])
    assert resumed.key == undisturbed.key
    assert resumed.content_digest == undisturbed.content_digest
    assert killed.metrics(resumed) == straight.metrics(undisturbed)
    steps = [record["step"] for record in killed.metrics(resumed) if record["phase"] == "train"]
    assert steps == list(range(1, STEPS + 1))
