"""One BOS, borders between prompt and response, and characters of several tokens."""

import pytest
from encoding import PROMPT, encoder, split
from tokenizers import AddedToken

from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.errors import TokenError
from rlhf_core.data.spans import Speller
from rlhf_core.models.scratch import build_tokenizer as build_scratch_tokenizer


@pytest.fixture
def tokenizer(model_tokenizer):
    return model_tokenizer("chatml")


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
