"""Learning rates of the schedules against transformers' and by hand. More by hand in test_engine.py."""

from typing import Any

import pytest
import torch
from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

from rlhf_core.config.base import SettingsError, parse_settings
from rlhf_core.config.training import OptimizerSettings
from rlhf_core.training.ds_config import lr_factor

STEPS = 50


def factors(**settings: Any) -> list[float]:
    factor = lr_factor(OptimizerSettings(lr=1.0, **settings), STEPS)
    return [factor(step) for step in range(STEPS + 1)]


def transformers_factors(make: Any, **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer, **arguments), []
    for _ in range(STEPS + 1):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("warmup", "decay", "floor"), [(0.1, 0.2, 0.1), (0.0, 0.5, 0.0), (0.4, 0.6, 0.3)])
def test_wsd_is_transformers_after_the_warm_up(warmup: float, decay: float, floor: float) -> None:
    found = factors(schedule="wsd", warmup_ratio=warmup, decay_ratio=decay, min_lr_ratio=floor)
    first = round(warmup * STEPS)
    wanted = transformers_factors(
        get_wsd_schedule,
        num_warmup_steps=first,
        num_decay_steps=round(decay * STEPS),
        num_training_steps=STEPS,
        decay_type="linear",
        min_lr_ratio=floor,
    )
    assert found[first:] == pytest.approx(wanted[first:], abs=1e-12)
    # Transformers' warm-up takes its first step at rate 0 (or the floor); here it is one step ahead.
    assert found[:first] == pytest.approx([(step + 1) / first for step in range(first)])


@pytest.mark.parametrize("warmup", [0.1, 0.0])
def test_inverse_sqrt_is_transformers_after_the_warm_up_down_to_the_floor(warmup: float) -> None:
    first = round(warmup * STEPS)
    wanted = transformers_factors(get_inverse_sqrt_schedule, num_warmup_steps=first)
    free = factors(schedule="inverse_sqrt", warmup_ratio=warmup, min_lr_ratio=0.0)
    assert free[first:] == pytest.approx(wanted[first:], abs=1e-12)
    floored = factors(schedule="inverse_sqrt", warmup_ratio=warmup, min_lr_ratio=0.5)
    assert floored[first:] == pytest.approx([max(0.5, value) for value in wanted[first:]], abs=1e-12)
    assert (min(floored[first:]) == 0.5) == (warmup > 0)


def test_wsd_by_hand() -> None:
    """Of 50 steps 5 warm up, 35 stay, and 10 go a tenth of the way to the floor each."""
    found = factors(schedule="wsd", warmup_ratio=0.1, min_lr_ratio=0.2)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[5:41] == [1.0] * 36
    assert found[41:] == pytest.approx([0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44, 0.36, 0.28, 0.2])


def test_phases_that_overlap_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"optimizer: warmup_ratio 0\.9 and decay_ratio 0\.2 are more than all"):
        parse_settings(OptimizerSettings, {"lr": 1.0, "schedule": "wsd", "warmup_ratio": 0.9}, "optimizer")
    assert OptimizerSettings(lr=1.0, warmup_ratio=0.9).decay_ratio == 0.2  # means nothing to the other schedules
