"""The pairs of rows from which KTO estimates its KL."""

import numpy as np
import pytest

from rlhf_core.training.preference import partner_rows

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("rows", [2, 3, 100])
def test_each_row_is_the_partner_of_one_other(rows: int) -> None:
    partners = partner_rows(rows, 7)
    assert sorted(partners) == list(range(rows))
    assert not np.any(partners == np.arange(rows))


def test_partners_are_drawn_once_for_all_steps() -> None:
    train, held_out = partner_rows(1000, 0), partner_rows(100, 0)
    assert partner_rows(1000, 0) is train
    assert partner_rows(100, 0) is held_out
