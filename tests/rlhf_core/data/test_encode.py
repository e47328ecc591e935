"""Items of every kind of row: ids, weights, labels, scalars; what is dropped, cut and refused."""

import json

import numpy as np
import pyarrow.parquet
import pytest
from tokenizers import AddedToken

from rlhf_core.config.data import DataSource
from rlhf_core.config.supervised import PrmSettings, TextSettings
from rlhf_core.data import arithmetic
from rlhf_core.data.encode import Encoder
from rlhf_core.data.errors import TokenError
from rlhf_core.data.loading import load_data
from rlhf_core.data.placeholders import split_steps
from rlhf_core.data.shapes import convert, recognise, renamed
from rlhf_core.data.spans import Speller
from rlhf_core.models.scratch import build_tokenizer as build_scratch_tokenizer

PRM = {"optimizer": {"lr": 1e-5}, "batch_size": 1, "max_len": 1000, "max_steps": 1}
PRM |= {"placeholder_token": "<|step|>", "reward_tokens": ("+", "-")}


@pytest.fixture
def tokenizer(model_tokenizer):
    return model_tokenizer("chatml")


def decode(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def split(tokenizer, sample):
    """(text that is not trained on before, text that is): for samples with one trained run at the end."""
    begin = int((sample.weights > 0).argmax())
    assert (sample.weights[begin:] > 0).all()
    return decode(tokenizer, sample.ids[:begin]), decode(tokenizer, sample.ids[begin:])


def encoder(tokenizer, max_len=1000, **text):
    return Encoder(tokenizer, TextSettings(**text), max_len)


def prm(**settings):
    return PrmSettings.model_validate(PRM | settings)


PROMPT = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "How are you?"}]


# -- SFT --------------------------------------------------------------------------------------------------------------


def test_a_demo_row_is_what_transformers_renders():
    tokenizer = build_scratch_tokenizer(64)
    rows = arithmetic.sft_rows(arithmetic.ArithmeticSpec(seed=0, rows=20))
    data = Encoder(tokenizer, TextSettings(), 64).sft(rows)
    for row, item in zip(rows, data.items, strict=True):
        user = [{"role": "user", "content": row["prompt"]}]
        head = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(
            [*user, {"role": "assistant", "content": row["response"]}], return_dict=False
        )
        (sample,) = item.samples
        assert sample.ids.tolist() == whole
        assert sample.weights.tolist() == [0.0] * len(head) + [1.0] * (len(whole) - len(head))


def test_strings_and_messages_give_the_same(tokenizer):
    rows = [
        {"prompt": "How are you?", "response": "Fine."},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Fine."}]},
    ]
    data = encoder(tokenizer).sft(rows)
    for item in data.items:
        assert split(tokenizer, item.samples[0]) == (PROMPT, "Fine.<|im_end|>")
        assert item.samples[0].ids.dtype == np.int32
        assert item.samples[0].weights.dtype == np.float32
    assert data.row_ids == [0, 1]


def test_format_template_encodes_prompt_and_response_apart_and_ends_with_eos(tokenizer):
    data = encoder(tokenizer, format="template", input_template="Q: {}\nA:\n").sft(
        [{"prompt": "How {are} you?", "response": "\nFine."}]
    )
    (sample,) = data.items[0].samples
    assert split(tokenizer, sample) == ("Q: How {are} you?\nA:\n", "\nFine.<|im_end|>")
    alone = tokenizer("Q: How {are} you?\nA:\n", add_special_tokens=False)["input_ids"]
    assert sample.ids[: len(alone)].tolist() == alone
    whole = tokenizer("Q: How {are} you?\nA:\n\nFine.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert sample.ids.tolist() != whole  # there the line breaks are one token


def test_format_text_trains_every_token_but_the_first(tokenizer):
    (sample,) = encoder(tokenizer, format="text").sft([{"text": "The answer is 42"}]).items[0].samples
    assert decode(tokenizer, sample.ids) == "The answer is 42<|im_end|>"
    assert sample.weights.tolist() == [0.0] + [1.0] * (len(sample) - 1)


@pytest.mark.parametrize(
    ("text", "row", "message"),
    [
        (
            "text",
            {"prompt": "a", "response": "b"},
            "row 1: text.format text needs a column text; the row has prompt, resp",
        ),
        ("chat", {"text": "a"}, "row 1: text.format chat needs a column response; the row has text"),
        ("template", {"messages": MESSAGES}, "row 1: text.format template takes prompt and response as text"),
        ("template", {"prompt": MESSAGES, "response": "b"}, "row 1: text.format template takes prompt as text"),
    ],
)
def test_rows_that_do_not_go_with_the_format_are_refused(tokenizer, text, row, message):
    with pytest.raises(TokenError, match=message):
        encoder(tokenizer, format=text).sft([row])


def test_a_template_file_replaces_the_tokenizers_own(tokenizer, tmp_path):
    file = tmp_path / "short.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    short = encoder(tokenizer, chat_template=str(file))
    (sample,) = short.sft([{"prompt": "How?", "response": "Fine."}]).items[0].samples
    assert split(tokenizer, sample) == ("How?<|im_end|>", "Fine.<|im_end|>")
    assert short.chat_template == file.read_text()
    with pytest.raises(TokenError, match=r"text.chat_template '.*none.jinja' cannot be read .*; give a Jinja file"):
        encoder(tokenizer, chat_template=str(tmp_path / "none.jinja"))


def test_a_tokenizer_without_template_is_refused_only_where_one_is_needed(make_tokenizer):
    bare = make_tokenizer(None, "<|im_end|>")
    with pytest.raises(
        TokenError, match="the tokenizer has no chat template; give a model whose tokenizer has one, or"
    ):
        encoder(bare)
    assert encoder(bare, format="template").chat_template is None


def test_a_tokenizer_with_several_templates_takes_the_one_for_tools_where_a_row_has_them(make_tokenizer, tokenizer):
    several = make_tokenizer(None, "<|im_end|>")
    plain = tokenizer.chat_template
    several.chat_template = {"default": plain, "tool_use": "with tools\n" + plain}
    messages = [*MESSAGES, {"role": "assistant", "content": "Fine."}]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    one = encoder(several)
    first, second = one.sft([{"messages": messages}, {"messages": messages, "tools": [tool]}]).items
    assert split(several, first.samples[0]) == (PROMPT, "Fine.<|im_end|>")
    assert split(several, second.samples[0]) == ("with tools\n" + PROMPT, "Fine.<|im_end|>")
    assert one.chat_template == several.chat_template  # what the tokens' key is made of
    several.chat_template = {"tool_use": plain}
    with pytest.raises(TokenError, match=r"row 1: .*the tokenizer has no chat template for this row"):
        encoder(several).sft([{"messages": messages}])


# -- BOS, borders, offsets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("writes", [0, 1, 2])
@pytest.mark.parametrize("text", ["chat", "template", "text"])
def test_a_sequence_begins_with_one_bos_if_the_template_or_the_tokenizer_wants_one(
    make_tokenizer, model_tokenizer, adds_bos, writes, text
):
    tokenizer = make_tokenizer("<s>", "<|im_end|>", adds_bos)
    tokenizer.chat_template = writes * "{{ bos_token }}" + model_tokenizer("chatml").chat_template
    row = {"text": "Fine."} if text == "text" else {"prompt": "How are you?", "response": "Fine."}
    data = encoder(tokenizer, format=text).sft([row])
    (sample,) = data.items[0].samples
    wanted = adds_bos or (writes > 0 and text == "chat")
    assert (sample.ids == tokenizer.bos_token_id).sum() == wanted
    if wanted:
        assert sample.ids[0] == tokenizer.bos_token_id
        assert sample.weights[0] == 0
    if text == "chat":
        assert split(tokenizer, sample) == ("<s>" * wanted + PROMPT, "Fine.<|im_end|>")


def test_offsets_without_white_space_give_the_same_weights(make_tokenizer, tokenizer):
    """GPT-2's tokenizer leaves white space out of its offsets."""
    trimmed = make_tokenizer(None, "<|im_end|>", trim_offsets=True)
    trimmed.chat_template = tokenizer.chat_template
    row = {"prompt": "How are you?", "response": " I am  fine,\n\nthank you. "}
    a, b = (encoder(one).sft([row]).items[0].samples[0] for one in (tokenizer, trimmed))
    assert a.ids.tolist() == b.ids.tolist()
    assert a.weights.tolist() == b.weights.tolist()


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("content", ["hello 😀", "日本", "é", "e\u0301", "hi   ", "a\n\n", "✓ done"])
@pytest.mark.parametrize("text", ["chat", "template", "text"])
def test_a_last_character_of_several_tokens_is_trained_on_whole(
    make_tokenizer, model_tokenizer, trim_offsets, content, text
):
    """A byte-level tokenizer gives each of a character's tokens the same offsets."""
    tokenizer = make_tokenizer(None, "<|im_end|>", trim_offsets=trim_offsets)
    tokenizer.chat_template = model_tokenizer("chatml").chat_template
    row = {"text": content} if text == "text" else {"prompt": "How are you?", "response": content}
    (sample,) = encoder(tokenizer, format=text).sft([row]).items[0].samples
    expected = tokenizer(content + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert sample.ids[-len(expected) :].tolist() == expected
    trained = len(expected) - (text == "text")  # nothing precedes the first token
    assert sample.weights.tolist() == [0.0] * (len(sample) - trained) + [1.0] * trained


def test_a_text_to_which_offsets_give_no_place_is_dropped(make_tokenizer):
    tokenizer = make_tokenizer(None, "<|im_end|>", trim_offsets=True)
    data = encoder(tokenizer, format="text").sft([{"text": " "}, {"text": "Fine."}])
    assert data.row_ids == [1]
    assert data.report.dropped["no token to train on"].first_row == 1


def test_a_response_that_shares_a_token_with_the_prompt_is_dropped_and_counted(tokenizer):
    rows = [{"prompt": "How?", "response": "\nFine."}, {"prompt": "How?", "response": "Fine."}]
    data = encoder(tokenizer).sft(rows)
    assert data.row_ids == [1]
    (dropped,) = data.report.dropped.items()
    assert dropped[0] == "a token holds both prompt and response"
    assert (dropped[1].items, dropped[1].first_row) == (1, 1)


def test_a_prompt_whose_tokens_change_once_a_response_follows_is_dropped(make_tokenizer, model_tokenizer):
    """GPT-2's pattern looks ahead: before a word two line breaks are two tokens, at the end of a text they are one."""
    tokenizer = make_tokenizer(None, "<|eot_id|>", pattern=r" ?\S+|\s+(?!\S)|\s+")
    tokenizer.chat_template = model_tokenizer("llama3").chat_template.replace("bos_token + ", "")
    with pytest.raises(TokenError, match="the prompt's tokens, alone, are not those with which the whole begins"):
        encoder(tokenizer).sft([{"prompt": "How?", "response": "Fine."}])


def conversation(turns, last="Fine."):
    long = "How are you today? I am fine, thank you. " * 5
    said = [long + str(number) for number in range(2 * turns - 1)] + [last]
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(said)]}


def test_a_long_conversation_is_encoded_a_few_times_and_not_once_a_turn(tokenizer, monkeypatch):
    characters = []
    encode_all = Speller._encode

    def counted(self, texts):
        characters.append(sum(map(len, texts)))
        return encode_all(self, texts)

    monkeypatch.setattr(Speller, "_encode", counted)
    encoder(tokenizer, 10**6).sft([conversation(30)])
    once = sum(len(one["content"]) for one in conversation(30)["messages"])
    assert sum(characters) < 4 * once  # whole prefixes would be 15 times


def test_the_border_of_a_late_turn_is_checked(make_tokenizer, model_tokenizer):
    """As above, with the line breaks merging at the last turn alone: a content that begins with white space."""
    tokenizer = make_tokenizer(None, "<|im_end|>")
    tokenizer.chat_template = model_tokenizer("chatml").chat_template
    data = encoder(tokenizer, 10**6).sft([conversation(20), conversation(20, "\nFine.")])
    assert data.row_ids == [0]
    assert list(data.report.dropped) == ["a token holds both prompt and response"]
    ahead = make_tokenizer(None, "<|eot_id|>", pattern=r" ?\S+|\s+(?!\S)|\s+")
    ahead.chat_template = model_tokenizer("llama3").chat_template.replace("bos_token + ", "")
    with pytest.raises(TokenError, match="the prompt's tokens, alone, are not those with which the whole begins"):
        encoder(ahead, 10**6).sft([conversation(20)])


def test_a_border_behind_what_only_looks_like_a_special_token(make_tokenizer, model_tokenizer):
    tokenizer = make_tokenizer(None, "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("swer", special=True, single_word=True)]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    content = "the answer 42 " + "How are you? " * 20
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Fine."}]}
    (sample,) = encoder(tokenizer).sft([row]).items[0].samples
    assert tokenizer.convert_tokens_to_ids("swer") not in sample.ids
    assert split(tokenizer, sample) == (content + "<|im_end|>", "Fine.<|im_end|>")


def test_a_token_that_reaches_into_the_response_is_never_trained_on(make_tokenizer):
    """The template's own "note: " shares the token " Fine" with the content."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ 'note: ' if m.role == 'assistant' }}{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"prompt": "How?", "response": "thank you"}
    tokenizer = make_tokenizer(None, "<|im_end|>")
    tokenizer.chat_template = template
    with pytest.raises(TokenError, match="a token holds both prompt and response: ' t"):
        encoder(tokenizer).sft([row])
    trimmed = make_tokenizer(None, "<|im_end|>", trim_offsets=True)  # whose offsets do not tell
    trimmed.chat_template = template
    with pytest.raises(
        TokenError, match=r"row 1: the tokens to be trained on decode to ' thank you<.*not to 'thank you<"
    ):
        encoder(trimmed).sft([row])


def test_unknown_characters_are_trained_on_as_the_unknown_token():
    tokenizer = build_scratch_tokenizer(64)
    (sample,) = Encoder(tokenizer, TextSettings(), 64).sft([{"prompt": "3+4=", "response": "7x"}]).items[0].samples
    assert split(tokenizer, sample) == ("<s><|user|>3+4=<|end|><|assistant|>", "7<unk><|end|>")


# -- pairs, labelled, prompts -----------------------------------------------------------------------------------------


def test_both_sides_of_a_pair_are_masked_up_to_their_response(tokenizer):
    row = {"prompt": "How are you?", "chosen": "Fine.", "rejected": "I am how you are", "margin": 2}
    data = encoder(tokenizer).pairs([row], margin=True)
    (item,) = data.items
    assert [split(tokenizer, sample) for sample in item.samples] == [
        (PROMPT, "Fine.<|im_end|>"),
        (PROMPT, "I am how you are<|im_end|>"),
    ]
    assert item.scalars == {"margin": 2.0}
    assert encoder(tokenizer).pairs([row]).items[0].scalars == {}
    with pytest.raises(TokenError, match="row 1: margin is None; give a number"):
        encoder(tokenizer).pairs([row | {"margin": None}], margin=True)


def test_a_pair_of_conversations_trains_its_responses_turns_alone(tokenizer):
    history = [*MESSAGES, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "42?"}]
    row = {
        "prompt": history,
        "chosen": [{"role": "assistant", "content": "Yes"}],
        "rejected": [
            {"role": "assistant", "content": "I look."},
            {"role": "tool", "content": "41"},
            {"role": "assistant", "content": "No"},
        ],
    }
    chosen, rejected = encoder(tokenizer).pairs([row]).items[0].samples
    assert split(tokenizer, chosen)[1] == "Yes<|im_end|>"
    trained = rejected.ids[rejected.weights > 0]
    assert decode(tokenizer, trained) == "I look.<|im_end|>No<|im_end|>"


def test_labelled_rows(tokenizer):
    rows = [{"prompt": "How are you?", "response": "Fine.", "label": label} for label in (True, False)]
    items = encoder(tokenizer).labelled(rows).items
    assert [item.scalars for item in items] == [{"label": 1.0}, {"label": 0.0}]
    assert split(tokenizer, items[0].samples[0]) == (PROMPT, "Fine.<|im_end|>")
    with pytest.raises(TokenError, match="row 1: label is 1; give true or false"):
        encoder(tokenizer).labelled([rows[0] | {"label": 1}])


def test_prompts_are_what_generation_is_given(tokenizer):
    rows = [{"prompt": "How are you?"}, {"prompt": MESSAGES}, {"prompt": "How " * 50}]
    data = encoder(tokenizer, 30).prompts(rows)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert [item.samples[0].ids.tolist() for item in data.items] == [expected, expected]
    assert not data.items[0].samples[0].weights.any()
    assert data.report.dropped["longer than max_len (30 tokens)"].items == 1


def test_an_empty_response_is_dropped(tokenizer):
    rows = [{"prompt": "a", "response": " \n"}, {"prompt": "a", "response": "b"}]
    data = encoder(tokenizer).sft(rows)
    assert data.row_ids == [1]
    assert data.report.dropped["empty response"].first_row == 1


# -- length -----------------------------------------------------------------------------------------------------------


def test_rows_that_are_too_long_are_dropped_or_cut_without_an_end_token(tokenizer):
    rows = [{"prompt": "How?", "response": "The answer is 42. " * n + "so"} for n in (1, 5)]
    lengths = [len(item.samples[0]) for item in encoder(tokenizer).sft(rows).items]
    limit = lengths[1] - 3
    dropped = encoder(tokenizer, limit).sft(rows)
    assert dropped.row_ids == [0]
    assert dropped.report.dropped[f"longer than max_len ({limit} tokens)"].first_row == 2
    cut = encoder(tokenizer, limit, truncation="cut").sft(rows)
    assert cut.row_ids == [0, 1]
    assert (cut.report.cut, cut.report.dropped) == (1, {})
    whole = encoder(tokenizer).sft(rows).items[1].samples[0]
    (sample,) = cut.items[1].samples
    assert sample.ids.tolist() == whole.ids[:limit].tolist()
    assert sample.weights.tolist() == whole.weights[:limit].tolist()
    assert tokenizer.eos_token_id not in sample.ids[-3:]


def test_a_row_at_the_limit_is_whole(tokenizer):
    rows = [{"prompt": "How?", "response": "The answer is 42."}]
    length = len(encoder(tokenizer).sft(rows).items[0].samples[0])
    for truncation in ("drop", "cut"):
        data = encoder(tokenizer, length, truncation=truncation).sft(rows)
        assert (len(data.items), data.report.cut) == (1, 0)


def test_a_pair_that_the_cut_makes_equal_is_dropped(tokenizer):
    same = "The answer is 42. " * 12
    rows = [
        {"prompt": "How?", "chosen": same + "Yes", "rejected": same + "No"},
        {"prompt": "How?", "chosen": "Yes", "rejected": "No"},
        {"prompt": "How?", "chosen": "Yes", "rejected": "Yes"},
    ]
    data = encoder(tokenizer, 40, truncation="cut").pairs(rows)
    assert data.row_ids == [1]
    assert {reason: one.items for reason, one in data.report.dropped.items()} == {
        "chosen and rejected are the same tokens once cut": 1,
        "chosen and rejected are the same tokens": 1,
    }


def test_a_prompt_that_leaves_no_room_is_dropped(tokenizer):
    rows = [{"prompt": "How are you? " * 20, "response": "Fine."}, {"prompt": "How?", "response": "Fine."}]
    data = encoder(tokenizer, 40, truncation="cut").sft(rows)
    assert data.row_ids == [1]
    assert "the prompt leaves no room for a response token" in data.report.dropped


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("max_len", [2, 3, 7, 1000])
def test_a_split_text_has_every_token_as_a_target_once_and_ends_once(make_tokenizer, max_len, adds_bos):
    tokenizer = make_tokenizer("<s>", "</s>", adds_bos)
    rows = [{"text": "The answer is 42. " * n} for n in (1, 5)]
    whole = encoder(tokenizer, format="text").sft(rows)
    data = encoder(tokenizer, max_len, format="text", truncation="split").sft(rows)
    assert sorted(set(data.row_ids)) == [0, 1]
    for row, item in enumerate(whole.items):
        chunks = [one.samples[0] for one, number in zip(data.items, data.row_ids, strict=True) if number == row]
        expected = item.samples[0].ids.tolist()
        assert all(len(chunk) == max_len for chunk in chunks[:-1])
        assert 2 <= len(chunks[-1]) <= max_len
        assert all(chunk.weights.tolist() == [0.0] + [1.0] * (len(chunk) - 1) for chunk in chunks)
        targets = [token for chunk in chunks for token in chunk.ids[1:].tolist()]
        assert [chunks[0].ids[0], *targets] == expected
        assert [chunk.ids[0] for chunk in chunks[1:]] == [chunk.ids[-1] for chunk in chunks[:-1]]
        assert targets.count(tokenizer.eos_token_id) == 1
    report = data.report
    assert (report.rows, report.cut, report.dropped) == (2, 0, {})
    assert report.rows + report.unrolled == report.items == report.samples == len(data.items)
    assert report.trained_tokens == whole.report.trained_tokens


def test_data_of_which_nothing_is_left_is_refused(tokenizer):
    with pytest.raises(
        TokenError, match=r"data set sft: none of the 2 rows can be used: longer than max_len \(3 tokens\)"
    ):
        encoder(tokenizer, 3).sft([{"prompt": "How?", "response": "Fine."}] * 2)


# -- steps ------------------------------------------------------------------------------------------------------------

STEPS = ["Step 1: 3 + 4 = 7.", "Step 2: 7 + 5 = 12.", "The answer is 12"]


@pytest.mark.parametrize("separator", ["\n", "\n\n", " / ", ""])
@pytest.mark.parametrize("text", ["chat", "template"])
def test_a_placeholder_stands_behind_each_steps_last_token(tokenizer, separator, text):
    row = {"prompt": "How are you?", "steps": STEPS, "labels": [True, False, True]}
    data = encoder(tokenizer, format=text).steps([row], prm(separator=separator))
    (sample,) = data.items[0].samples
    placeholder = tokenizer.convert_tokens_to_ids("<|step|>")
    places = np.flatnonzero(sample.ids == placeholder)
    assert np.flatnonzero(sample.weights).tolist() == places.tolist()
    assert sample.weights[places].tolist() == [1, 1, 1]
    assert sample.labels is not None
    assert sample.labels[places].tolist() == [0, 1, 0]  # indices into reward_tokens: right is the first
    assert sample.labels.dtype == np.float32
    # Without the placeholders it is the solution's ordinary encoding, up to the last step.
    prompt = PROMPT if text == "chat" else "User: How are you?\nAssistant: "
    bare = np.delete(sample.ids, places)
    assert decode(tokenizer, bare) == prompt + separator.join(STEPS)
    sft = encoder(tokenizer, format=text).sft([{"prompt": "How are you?", "response": separator.join(STEPS)}])
    assert bare.tolist() == sft.items[0].samples[0].ids[:-1].tolist()
    # Each lies behind the first token with which the text reaches the step's end.
    for number, place in enumerate(places):
        reached = prompt + separator.join(STEPS[: number + 1])
        before = [token for token in sample.ids[:place].tolist() if token != placeholder]
        assert decode(tokenizer, before).startswith(reached)
        assert not decode(tokenizer, before[:-1]).startswith(reached)


def test_a_step_that_scoring_would_split_is_dropped(tokenizer):
    """What is trained as one step must be scored as one."""
    rows = [{"prompt": "How?", "steps": steps, "labels": [True, False]} for steps in (["a\nb", "c"], ["a\n", "c"])]
    data = encoder(tokenizer).steps(rows, prm())
    assert data.row_ids == [1]
    assert data.report.dropped["a step holds the separator"].first.endswith(
        "set `separator` to a text that no step holds"
    )
    _, _, solution = decode(tokenizer, data.items[0].samples[0].ids).replace("<|step|>", "").rpartition("assistant\n")
    assert split_steps(solution, "\n") == ["a", "c"]
    assert encoder(tokenizer).steps(rows, prm(separator="\n\n")).row_ids == [0, 1]


@pytest.mark.parametrize("text", ["chat", "template"])
def test_a_step_that_ends_in_a_character_of_several_tokens_keeps_it_whole(tokenizer, text):
    row = {"prompt": "How?", "steps": ["3 + 4 = 7 ✓", "so 7 ✓"], "labels": [True, True]}
    (sample,) = encoder(tokenizer, format=text).steps([row], prm()).items[0].samples
    assert decode(tokenizer, sample.ids).endswith("3 + 4 = 7 ✓<|step|>\nso 7 ✓<|step|>")


def test_a_template_that_trims_the_solution_moves_no_step(model_tokenizer):
    tokenizer = model_tokenizer("llama3")
    row = {"prompt": "How?", "steps": ["  " + STEPS[0], STEPS[1] + " "], "labels": [True, True]}
    (sample,) = encoder(tokenizer).steps([row], prm()).items[0].samples
    text = decode(tokenizer, sample.ids)
    assert text.endswith(f"{STEPS[0]}<|step|>\n{STEPS[1]}<|step|>")


def test_labels_keep_their_type(tokenizer):
    def labels(given, **settings):
        row = {"prompt": "How?", "steps": STEPS[: len(given)], "labels": given}
        (sample,) = encoder(tokenizer).steps([row], prm(**settings)).items[0].samples
        return sample.labels[tokenizer.convert_tokens_to_ids("<|step|>") == sample.ids].tolist(), int(
            sample.weights.sum()
        )

    assert labels([0.25, 1, False], labels="soft") == ([0.25, 1.0, 0.0], 3)
    assert labels([1.0, 0], labels="hard") == ([0.0, 1.0], 2)
    assert labels(["-", "?", "+"], reward_tokens=("+", "-", "?")) == ([1.0, 2.0, 0.0], 3)
    assert labels([None, True]) == ([0.0, 0.0], 1)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_three_reward_tokens_from_the_file_to_the_verdicts(tokenizer, tmp_path, suffix):
    """The written rows are what the stage prm reads: a step without a label has a placeholder and no weight."""
    rows = [
        {"prompt": "How?", "steps": STEPS, "labels": ["-", None, "?"]},
        {"prompt": "Why?", "steps": STEPS[:2], "labels": ["+", "-"]},
    ]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    loaded = load_data("steps", DataSource(path=str(path))).rows
    written = [json.loads(json.dumps(row, allow_nan=False)) for row in loaded]
    found = []
    for item in encoder(tokenizer).steps(written, prm(reward_tokens=("+", "-", "?"))).items:
        (sample,) = item.samples
        places = np.flatnonzero(sample.ids == tokenizer.convert_tokens_to_ids("<|step|>"))
        assert sample.labels is not None
        found.append((sample.weights[places].tolist(), sample.labels[places].tolist()))
    assert found[0][0] == [1, 0, 1]
    assert (found[0][1][0], found[0][1][2]) == (1, 2)  # indices into reward_tokens
    assert found[1] == ([1, 1], [0, 1])
    with pytest.raises(TokenError, match=r"row 1: label '\?' with labels: hard; give true, false or one of \+, -, or"):
        encoder(tokenizer).steps(written, prm())


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"labels": [None, float("nan")]}, {}, "row 2: no step has a label; leave the row out"),
        ({"labels": [True]}, {}, "row 2: 2 steps and 1 labels; give one label a step, null for none"),
        ({"steps": ["a", " "]}, {}, "row 2: step 2 is empty; leave it and its label out"),
        (
            {"labels": [-100, True]},
            {},
            r"row 2: label -100 with labels: hard; give true, false or one of \+, -, or null",
        ),
        ({"labels": [0.5, True]}, {}, "row 2: label 0.5 with labels: hard"),
        ({"labels": [1.5, True]}, {"labels": "soft"}, "row 2: label 1.5 with labels: soft; give 0 to 1, or null"),
        ({"labels": ["+", "-"]}, {"labels": "soft"}, "row 2: label '\\+' with labels: soft"),
    ],
)
def test_steps_that_cannot_be_learned_from_are_refused_with_their_row(tokenizer, row, settings, message):
    good = {"prompt": "How?", "steps": ["a", "b"], "labels": [True, False]}
    with pytest.raises(TokenError, match=message):
        encoder(tokenizer).steps([good, good | row], prm(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placeholder_token": "ки"}, "placeholder_token 'ки' is 4 tokens"),
        ({"reward_tokens": ("+", "wrong")}, "reward_tokens 'wrong' is . tokens .* and must be one of the vocabulary"),
    ],
)
def test_tokens_that_are_not_one_id_are_refused(tokenizer, settings, message):
    with pytest.raises(TokenError, match=message):
        encoder(tokenizer).steps([], prm(**settings))


def test_steps_that_are_cut_keep_the_labels_of_those_left(tokenizer):
    row = {"prompt": "How?", "steps": STEPS, "labels": [False, True, True]}
    whole = encoder(tokenizer).steps([row], prm()).items[0].samples[0]
    second = int(np.flatnonzero(whole.weights)[1])
    data = encoder(tokenizer, second, truncation="cut").steps([row], prm())
    (sample,) = data.items[0].samples
    assert sample.ids.tolist() == whole.ids[:second].tolist()
    assert sample.weights.sum() == 1
    assert sample.labels is not None
    assert sample.labels[sample.weights > 0].tolist() == [1]
    assert data.report.cut == 1


# -- rows that cannot be tokenised ------------------------------------------------------------------------------------


def gemma_rows():
    system, question, answer = (
        {"role": role, "content": content} for role, content in (("system", "s"), ("user", "a"), ("assistant", "b"))
    )
    return [
        {"messages": [question, answer]},
        {"messages": [system, question, answer]},
        {"messages": [question, question, answer]},
        {"messages": [question, answer, system, question, answer]},
        {"messages": [question, answer, question, question, answer]},
    ]


def test_a_row_that_the_template_refuses_stops_the_stage_or_is_left_out_and_counted(model_tokenizer):
    tokenizer = model_tokenizer("gemma")
    refused = "the chat template refuses the conversation: "
    with pytest.raises(TokenError) as caught:
        encoder(tokenizer).sft(gemma_rows())
    assert str(caught.value) == (
        f"row 2: message 3 (assistant): {refused}System role not supported; text.on_bad_row: drop leaves such rows out"
    )
    data = encoder(tokenizer, on_bad_row="drop").sft(gemma_rows())
    assert data.row_ids == [0]
    roles = refused + "Conversation roles must alternate user/assistant/user/assistant/..."
    # Rows that are bad in the same way are counted together, whichever message is at fault.
    assert {reason: (one.items, one.first_row) for reason, one in data.report.dropped.items()} == {
        refused + "System role not supported": (1, 2),
        roles: (3, 3),
    }
    assert data.report.dropped[roles].first == f"{roles}: message 3 (assistant): {roles}"
    assert data.report.rows == data.report.items + 4
    with pytest.raises(TokenError, match=f"none of the 4 rows can be used: {refused}System role not supported: 1 "):
        encoder(tokenizer, on_bad_row="drop").sft(gemma_rows()[1:])


def test_rows_whose_tokens_or_labels_are_wrong_are_left_out_too(make_tokenizer, tokenizer):
    rows = [{"prompt": "How?", "steps": ["a", "b"], "labels": labels} for labels in ([7, True], [True], [True, True])]
    data = encoder(tokenizer, on_bad_row="drop").steps(rows, prm())
    assert data.row_ids == [2]
    assert set(data.report.dropped) == {"a label that is not allowed", "as many labels as steps are needed"}
    trimmed = make_tokenizer(None, "<|im_end|>", trim_offsets=True)
    trimmed.chat_template = tokenizer.chat_template.replace(
        "+ message['content']", "+ ('note: ' if message['content'] == 'thank you' else '') + message['content']"
    )
    rows = [{"prompt": "How?", "response": response} for response in ("thank you", "Fine.")]
    data = encoder(trimmed, on_bad_row="drop").sft(rows)
    assert (data.row_ids, sum(one.items for one in data.report.dropped.values())) == ([1], 1)


# -- the report -------------------------------------------------------------------------------------------------------


def test_every_row_is_accounted_for(model_tokenizer, tmp_path):
    tokenizer = model_tokenizer("qwen3")
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "Fine."}]
    long = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "42 " * 200}]
    rows = [{"messages": turns}, {"messages": turns * 2}, {"messages": turns + long}, {"messages": turns[:1]}]
    report = encoder(tokenizer, 100).sft(rows).report
    assert (report.rows, report.unrolled, report.items, report.cut) == (4, 2, 4, 0)
    dropped = {reason: (one.items, one.first_row) for reason, one in report.dropped.items()}
    assert dropped == {"longer than max_len (100 tokens)": (1, 3), "no assistant turn to train on": (1, 4)}
    assert report.rows + report.unrolled == report.items + sum(items for items, _ in dropped.values())
    answer = len(tokenizer("Fine.<|im_end|>", add_special_tokens=False)["input_ids"])
    assert report.trained_tokens == 4 * answer
    assert report.lengths is not None
    assert sum(report.lengths.counts) == report.samples == 4
    assert report.lengths.edges[0] == 0
    assert report.lengths.edges[-1] > report.lengths.max
    assert report.example == (
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Fine.<|im_end|>⟧"
    )
    assert json.loads(report.to_json())["items"] == 4
    assert type(report).from_json(report.to_json()) == report
    markdown = report.to_markdown()
    assert "**sft**: 4 rows read, 4 items kept, 2 dropped, 0 cut at 100 tokens, 2 more" in markdown
    assert "| no assistant turn to train on | 1 | 4 |" in markdown
    assert "⟦Fine.<|im_end|>⟧" in markdown
    report.plot(tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_of_steps_shows_each_verdict(tokenizer):
    row = {"prompt": "How?", "steps": ["a", "b"], "labels": [True, False]}
    example = encoder(tokenizer).steps([row], prm()).report.example
    assert example.endswith("a⟦<|step|> = 0⟧\nb⟦<|step|> = 1⟧")


def test_rows_are_the_same_however_many_are_encoded_at_once(tokenizer, monkeypatch):
    rows = [{"prompt": f"How {n}?", "response": "42 " * (n % 7 + 1)} for n in range(20)]
    whole = encoder(tokenizer).sft(rows)
    monkeypatch.setattr("rlhf_core.data.encode._CHARACTERS_AT_ONCE", 300)
    parts = encoder(tokenizer).sft(rows)
    assert [item.samples[0].ids.tolist() for item in parts.items] == [i.samples[0].ids.tolist() for i in whole.items]
    assert parts.report == whole.report


def test_real_conversations_with_tools_train_each_assistant_message_once(model_tokenizer, test_data):
    tokenizer = model_tokenizer("qwen3")
    raw = json.loads((test_data / "chat" / "glaive_toolcall_en_demo.json").read_text(encoding="utf-8"))[:40]
    rows = [renamed(row, {}) for row in raw]
    shape = recognise(rows, "sft").shape
    canonical = [convert(row, "sft", shape, "") for row in rows]
    data = encoder(tokenizer, 100_000).sft(canonical)
    said = [m for row in canonical for m in row["messages"] if m["role"] == "assistant"]
    trained = "".join(decode(tokenizer, one.samples[0].ids[one.samples[0].weights > 0]) for one in data.items)
    assert trained.count("<|im_end|>") == len(said)
    at = 0
    for message in said:
        for text in (message["content"], *(json.dumps(c["function"]["name"]) for c in message.get("tool_calls", ()))):
            at = trained.index(text, at) + len(text)
    assert "<tool_response>" not in trained
