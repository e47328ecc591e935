"""How the items of a step are dealt, cut and laid out."""

import itertools

import numpy as np
import pytest
import torch

from rlhf_core.data.layout import Layout, fill_rate, make_batch, pack, plan_step
from rlhf_core.data.samples import Item, Sample

LENGTHS = [7, 3, 12, 12, 1, 9, 5, 2, 2, 11, 6]


def sample(*ids: int, start: int = 1, labels: bool = False) -> Sample:
    weights = np.array([0.0] * start + [1.0] * (len(ids) - start), dtype=np.float32)
    return Sample(np.array(ids, dtype=np.int32), weights, np.array(ids, dtype=np.float32) / 10 if labels else None)


def layout(ranks: int = 1, micro: int = 2, packing: bool = False, capacity: int = 12, multiple: int = 1) -> Layout:
    return Layout(ranks, micro, packing, capacity, multiple)


@pytest.mark.parametrize(
    ("ranks", "micro", "packing"), list(itertools.product([1, 2, 3, 16], [1, 2, 4], [False, True]))
)
def test_every_item_is_in_one_place_and_ranks_make_the_same_number_of_calls(ranks: int, micro: int, packing: bool):
    plan = plan_step(LENGTHS, layout(ranks, micro, packing))
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    items = [item for rank in plan for batch in rank for row in batch for item in row]
    assert sorted(items) == list(range(len(LENGTHS)))
    assert all(len(batch) <= micro for rank in plan for batch in rank)
    if packing:
        assert all(sum(LENGTHS[i] for i in row) <= 12 for rank in plan for batch in rank for row in batch)


def test_a_ragged_step_of_nine_items_on_eight_ranks_leaves_no_rank_without_its_calls():
    """OpenRLHF deals 2,2,2,2,1,0,0,0 there, and the next collective hangs."""
    plan = plan_step([5] * 9, layout(ranks=8, micro=1))
    assert [len(rank) for rank in plan] == [2] * 8
    assert [sum(len(batch) for batch in rank) for rank in plan] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_items_of_like_length_share_a_micro_batch_and_a_turn():
    plan = plan_step([1, 9, 2, 10, 3, 11, 4, 12], layout(ranks=2, micro=2))
    assert plan == [[[[7], [3]], [[6], [2]]], [[[5], [1]], [[4], [0]]]]


def test_best_fit_decreasing_by_hand():
    # 12 and 12 fill a row each; 11 leaves 1, which 1 takes; 9 leaves 3, which 3 takes; 7 + 5; 6 + 2 + 2.
    rows = pack(LENGTHS, 12)
    assert sorted(sorted(LENGTHS[i] for i in row) for row in rows) == [
        [1, 11],
        [2, 2, 6],
        [3, 9],
        [5, 7],
        [12],
        [12],
    ]
    assert fill_rate([LENGTHS], layout(packing=True).capacity) == pytest.approx(70 / 72)


def test_best_fit_fills_rows_of_many_items():
    lengths = np.random.default_rng(0).integers(10, 1024, 2000).tolist()
    assert fill_rate([lengths], 2048) > 0.99


def test_an_item_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="item 1 has 13 tokens, and a row holds 12"):
        pack([3, 13], 12)


PAIRS = [Item((sample(1, 2, 3), sample(4, 5)), {"margin": 0.5}), Item((sample(6, 7), sample(8, 9)), {"margin": 2.0})]


def test_a_padded_batch_of_pairs_by_hand():
    batch = make_batch(PAIRS, [[0], [1]], layout(), pad_token_id=99)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 99], [6, 7, 99], [8, 9, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 2]] * 4
    assert batch["segments"].tolist() == [[0, 0, 0], [1, 1, -1], [2, 2, -1], [3, 3, -1]]
    assert batch["weights"].tolist() == [[0, 1, 1], [0, 1, 0], [0, 1, 0], [0, 1, 0]]
    assert batch["real"].tolist() == [1, 1]
    assert batch["margin"].tolist() == [0.5, 2.0]
    assert "labels" not in batch


def test_a_packed_batch_of_pairs_by_hand():
    batch = make_batch(PAIRS, [[1, 0]], layout(packing=True, multiple=4), pad_token_id=99)
    assert batch["input_ids"].tolist() == [[6, 7, 8, 9, 1, 2, 3, 4, 5, 99, 99, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["segments"].tolist() == [[0, 0, 1, 1, 2, 2, 2, 3, 3, -1, -1, -1]]
    assert batch["margin"].tolist() == [2.0, 0.5]


def test_labels_lie_where_their_tokens_do():
    items = [Item((sample(1, 2, labels=True),)), Item((sample(3, 4, 5, labels=True),))]
    batch = make_batch(items, [[0], [1]], layout(), pad_token_id=0)
    torch.testing.assert_close(batch["labels"], torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.4, 0.5]]))


@pytest.mark.parametrize("packing", [False, True])
def test_a_micro_batch_without_items_has_tokens_for_the_model_and_no_weight(packing: bool):
    batch = make_batch(PAIRS, [], layout(packing=packing), pad_token_id=99)
    assert batch["input_ids"].flatten().tolist()[:3] == [1, 2, 3]
    assert batch["weights"].sum() == 0
    assert batch["real"].tolist() == [0]
