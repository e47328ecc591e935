import numpy as np
import pytest
import torch

from rlhf_core.data.batches import (
    SampleOrder,
    TokenError,
    chunks,
    model_inputs,
    pad_right,
    rank_slice,
    render_exchange,
    render_prompt,
    response_mask,
)
from rlhf_core.models.scratch import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(64)


def test_the_response_span_is_the_answer_and_its_end_token(tokenizer):
    exchange = render_exchange(tokenizer, "3+4=", "3+4=7#7")
    response = tokenizer.decode(exchange.ids[exchange.response_start :])
    assert response == "3+4=7#7<|end|>"
    assert tokenizer.decode(exchange.ids[: exchange.response_start]) == "<s><|user|>3+4=<|end|><|assistant|>"
    assert exchange.ids.count(tokenizer.bos_token_id) == 1
    assert list(exchange.ids[: exchange.response_start]) == render_prompt(tokenizer, "3+4=")


def test_a_template_that_writes_after_the_end_token_does_not_train_it(tokenizer):
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>={% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    exchange = render_exchange(tokenizer, "3+4=", "7")
    assert tokenizer.decode(exchange.ids[exchange.response_start :]) == "7<|end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "renders the prompt otherwise"),
        ("{% for m in messages %}{{ m.content }}={% endfor %}", "does not end a response with the tokenizer's eos"),
    ],
)
def test_a_template_whose_span_would_be_a_guess_is_refused(template, message):
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = template
    with pytest.raises(TokenError, match=message):
        render_exchange(tokenizer, "3+4=", "7")


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_a_step_out_without_loss(ranks):
    ids = SampleOrder(30, seed=1).ids(5, 8)
    assert [i for rank in range(ranks) for i in rank_slice(ids, rank, ranks)] == ids


def test_an_uneven_deal_is_refused():
    with pytest.raises(ValueError, match="7 samples cannot be dealt evenly to 2 ranks"):
        rank_slice(range(7), 0, 2)


def test_padding():
    assert pad_right([[1, 2], [3]], 9).tolist() == [[1, 2], [3, 9]]
    assert pad_right([np.array([0.5])], dtype=torch.float32).tolist() == [[0.5]]
    inputs = model_inputs([[5, 6, 7], [8]], pad_token_id=0)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert [list(c) for c in chunks([1, 2, 3], 2)] == [[1, 2], [3]]


def test_the_response_mask_covers_response_tokens_and_no_padding(tokenizer):
    rows = [render_exchange(tokenizer, "3+4=", "7"), render_exchange(tokenizer, "3+4+5=", "12#12")]
    mask = response_mask(rows)
    assert mask.dtype == torch.bool
    assert mask.sum(dim=1).tolist() == [len("7") + 1, len("12#12") + 1]
    first = rows[0]
    assert mask[0].nonzero().flatten().tolist() == [first.response_start, first.response_start + 1]
