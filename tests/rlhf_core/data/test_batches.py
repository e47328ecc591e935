import numpy as np
import torch

from rlhf_core.data.batches import SampleOrder, chunks, pad_right


def test_each_epoch_holds_every_row_once_in_an_order_of_its_own():
    order = SampleOrder(10, seed=3)
    epochs = [order.ids(epoch * 10, 10) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert SampleOrder(10, seed=4).ids(0, 10) != epochs[0]


def test_what_comes_after_a_position_does_not_depend_on_how_one_got_there():
    order = SampleOrder(7, seed=0)
    whole = order.ids(0, 40)
    assert SampleOrder(7, seed=0).ids(13, 20) == whole[13:33]
    assert [i for start in range(0, 40, 5) for i in order.ids(start, 5)] == whole


def test_an_epoch_is_drawn_once_for_all_calls_that_read_it(monkeypatch):
    drawn = []
    make = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or make(seed))
    order = SampleOrder(10, seed=3)
    order.ids(0, 4)
    order.ids(4, 4)
    assert drawn == [[3, 0]]
    order.ids(8, 5)
    order.ids(13, 20)
    assert drawn == [[3, 0], [3, 1], [3, 2], [3, 3]]


def test_padding():
    assert pad_right([[1, 2], [3]], 9).tolist() == [[1, 2], [3, 9]]
    assert pad_right([np.array([0.5])], dtype=torch.float32).tolist() == [[0.5]]
    assert pad_right([[5, 6, 7], [8]]).tolist() == [[5, 6, 7], [8, 0, 0]]
    assert [list(c) for c in chunks([1, 2, 3], 2)] == [[1, 2], [3]]
