"""Weights that are looked at through their moving average, and put back."""

from typing import Any

import pytest

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ({"zero_stage": 0}, "float32"),
        ({"zero_stage": 2}, "bfloat16"),
        ({"zero_stage": 3}, "float32"),
        ({"zero_stage": 3, "zpg": 2}, "bfloat16"),
    ],
)
def test_a_rank_keeps_its_own_part_and_every_bit_comes_back(
    groups: Any, llama: str, exchanges: Any, layout: dict[str, Any], dtype: str
) -> None:
    """Two ranks keep half of the bytes each, but for ZeRO-3's padding."""
    trainer = {"ranks": 2, "micro_batch_size": 2, **layout}
    both = groups[2].run("look_at_average", model=llama, trainer=trainer, samples=exchanges, dtype=dtype)
    for done in both:
        assert done["under"] != done["before"] == done["after"]
        assert done["further 0.9"] == done["further None"]
        assert done["kept"] == pytest.approx(done["all"] / 2, rel=0.01)
