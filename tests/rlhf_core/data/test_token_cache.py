import pickle

import numpy as np
import pytest

from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.samples import Item, Sample
from rlhf_core.data.token_cache import ItemWriter, TokenTable, cached_tokens, token_key, tokenizer_digest
from rlhf_core.store.backends import StoreError
from rlhf_core.store.store import Store


def item(*lengths, labels=False, **scalars):
    def sample(length):
        numbers = np.arange(length)
        given = (numbers / 7).astype(np.float32) if labels else None
        return Sample(numbers.astype(np.int32) + length, (numbers % 2).astype(np.float32), given)

    return Item(tuple(sample(length) for length in lengths), scalars)


def assert_equal(a, b):
    assert dict(a.scalars) == dict(b.scalars)
    assert len(a.samples) == len(b.samples)
    for x, y in zip(a.samples, b.samples, strict=True):
        for one, other in ((x.ids, y.ids), (x.weights, y.weights), (x.labels, y.labels)):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.dtype == other.dtype
                assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    "items",
    [
        [item(3), item(1), item(5)],
        [item(3, 4, margin=0.1), item(2, 9, margin=-1.0)],
        [item(4, labels=True, label=1.0), item(2, labels=True, label=0.0)],
        [item(n % 5 + 1) for n in range(2500)],
    ],
    ids=["sft", "pairs", "labelled", "chunks"],
)
def test_items_come_back_as_they_were(tmp_path, items):
    with ItemWriter(tmp_path / "tokens.arrow") as writer:
        for n, one in enumerate(items):
            writer.add([one], 2 * n)
    table = TokenTable(tmp_path / "tokens.arrow")
    assert len(table) == len(items)
    assert table.lengths().tolist() == [one.tokens for one in items]
    assert table.row_ids().tolist() == [2 * n for n in range(len(items))]
    for number in {0, len(items) // 2, len(items) - 1}:
        assert_equal(table.item(number), items[number])
    with pytest.raises(IndexError):
        table.item(len(items))
    again = pickle.loads(pickle.dumps(table))  # noqa: S301 - as a rank gets it
    assert_equal(again.item(0), items[0])


def test_items_that_differ_in_form_are_refused(tmp_path):
    with pytest.raises(ValueError, match="all must have the same"), ItemWriter(tmp_path / "tokens.arrow") as writer:
        writer.add([item(3), item(3, 4)], 0)


@pytest.fixture
def encoder(model_tokenizer):
    return Encoder(model_tokenizer("chatml"), TextSettings(), 100)


ROWS = [{"prompt": "How?", "response": "Fine."}, {"prompt": "How " * 200, "response": "No"}]


def sft_of(encoder, rows):
    return lambda sink: encoder.sft(rows, into=sink).report


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_tokens_are_made_once(tmp_path, encoder, scheme):
    store = Store(f"{scheme}{tmp_path / 'store'}")
    calls = []

    def encode(sink):
        calls.append(1)
        return encoder.sft(iter(ROWS), into=sink).report

    first = cached_tokens(store, "k" * 64, tmp_path / "a", encode)
    second = cached_tokens(store, "k" * 64, tmp_path / "b", encode)
    assert (first.hit, second.hit, len(calls)) == (False, True, 1)
    assert second.report == first.report == encoder.sft(ROWS).report
    assert_equal(second.table.item(0), encoder.sft(ROWS).items[0])
    assert second.table.end_token_ids == (encoder.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    cached_tokens(store, "l" * 64, tmp_path / "b", encode)
    assert len(calls) == 2


def test_an_entry_without_its_marker_does_not_exist_and_a_damaged_one_is_refused(tmp_path, encoder):
    store = Store(str(tmp_path / "store"))
    cached_tokens(store, "k", tmp_path / "a", sft_of(encoder, ROWS))
    (file,) = (tmp_path / "store").rglob("tokens.arrow")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        cached_tokens(store, "k", tmp_path / "b", sft_of(encoder, ROWS))
    store.delete_file("cache/tokens/k/COMPLETE.json")
    assert not cached_tokens(store, "k", tmp_path / "c", sft_of(encoder, ROWS)).hit


def test_of_two_writers_the_first_to_finish_counts(tmp_path, encoder):
    store = Store(str(tmp_path / "store"))

    def encode(sink):  # while this one encodes, another one finishes
        cached_tokens(store, "k", tmp_path / "other", sft_of(encoder, ROWS[:1]))
        return encoder.sft(ROWS, into=sink).report

    late = cached_tokens(store, "k", tmp_path / "late", encode)
    assert late.report.rows == 1


def test_the_key_holds_all_that_the_tokens_depend_on(make_tokenizer, model_tokenizer, tmp_path):
    chatml = model_tokenizer("chatml")
    given = {
        "kind": "sft",
        "rows_digest": "0" * 64,
        "tokenizer": chatml,
        "chat_template": chatml.chat_template,
        "text": TextSettings(),
        "max_len": 100,
    }
    key = token_key(**given)
    assert key == token_key(**given)
    assert len(key) == 64
    adding = make_tokenizer("<s>", "<|im_end|>", True)
    others = [
        {"kind": "pairs"},
        {"rows_digest": "1" * 64},
        {"tokenizer": make_tokenizer("<s>", "<|im_end|>")},
        {"tokenizer": adding},
        {"chat_template": chatml.chat_template + " "},
        {"text": TextSettings(train_on="last")},
        {"text": TextSettings(truncation="cut")},
        {"text": TextSettings(format="template")},
        {"max_len": 101},
        {"settings": {"margin": True}},
    ]
    keys = [token_key(**given | other) for other in others]
    assert len({key, *keys}) == 1 + len(others)
    # Of several templates by name, any may have rendered a row.
    several = [{"default": "a", "tool_use": "b"}, {"default": "a", "tool_use": "c"}]
    assert len({token_key(**given | {"chat_template": one}) for one in several}) == 2
    # Where a template's file lies does not matter, its content does.
    assert token_key(**given | {"text": TextSettings(chat_template="a.jinja")}) == key


def test_a_tokenizers_digest_is_that_of_its_content(make_tokenizer):
    tokenizer = make_tokenizer(None, "<|im_end|>")
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=5)  # leaves its backend set to pad
    assert tokenizer_digest(tokenizer) == before == tokenizer_digest(make_tokenizer(None, "<|im_end|>"))
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_digest(tokenizer) != before


def test_a_newer_encoder_makes_new_keys(model_tokenizer, monkeypatch):
    given = ("sft", "0", model_tokenizer("chatml"), None, TextSettings(), 100)
    before = token_key(*given)
    monkeypatch.setattr("rlhf_core.data.token_cache.ENCODER_VERSION", 10_000)
    assert token_key(*given) != before
