"""How a rollout is cut: into optimizer steps, of these into the ranks' parts, and of those into micro-batches."""

from itertools import pairwise, product

import numpy as np
import pytest

from rlhf_core.data.layout import Layout
from rlhf_core.training.rl_batches import optimizer_steps, shares


@pytest.mark.parametrize(("trajectories", "batch_size", "sizes"), [(12, 4, [4, 4, 4]), (7, 4, [4, 3]), (3, 4, [3])])
def test_each_epoch_trains_every_trajectory_once_and_the_last_step_may_be_ragged(
    trajectories: int, batch_size: int, sizes: list[int]
) -> None:
    steps = [list(ids) for ids in optimizer_steps(trajectories, batch_size, epochs=3, seed=5)]
    assert [len(ids) for ids in steps] == 3 * sizes
    count = len(sizes)
    epochs = [sum(steps[start : start + count], []) for start in range(0, 3 * count, count)]  # noqa: RUF017
    assert all(sorted(epoch) == list(range(trajectories)) for epoch in epochs)
    assert trajectories < 5 or all(one != other for one, other in pairwise(epochs))
    assert steps == [list(ids) for ids in optimizer_steps(trajectories, batch_size, epochs=3, seed=5)]
    assert trajectories < 5 or steps != [list(ids) for ids in optimizer_steps(trajectories, batch_size, 3, seed=6)]


@pytest.mark.parametrize(("ranks", "packing", "seed"), list(product([2, 3, 8], [False, True], range(3))))
def test_ranks_have_tokens_alike_to_within_the_longest_row(ranks: int, packing: bool, seed: int) -> None:
    """Of long responses and short ones, in the order in which they come: by number alone a rank may get all long ones.
    A row is one trajectory or, packed, up to 512 tokens."""
    lengths = np.random.default_rng(seed).choice([20, 30, 200, 250, 400], 101).tolist()
    layout = Layout(ranks=ranks, micro_batch_size=2, packing=packing, capacity=512)
    tokens = [sum(lengths[number] for number in share.numbers) for share in shares(lengths, layout)]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) - min(tokens) <= (512 if packing else max(lengths))


def test_a_micro_batch_is_cut_by_its_budget_of_tokens() -> None:
    """Packed: 2 rows of at most 100 tokens, so as many trajectories as fit, 20 short ones or 2 long ones."""
    lengths = [100] * 4 + [10] * 40
    (share,) = shares(lengths, Layout(ranks=1, micro_batch_size=2, packing=True, capacity=100))
    budgets, counts = [], []
    for micro in share.micro_batches:
        own = [share.numbers[place] for row in micro for place in row]
        budgets.append(sum(lengths[number] for number in own))
        counts.append(len(own))
    assert budgets == [200] * 4
    assert counts == [2, 2, 20, 20]
