"""Items of every kind of row: ids, weights, labels, scalars; what is dropped, cut and refused."""

import json

import numpy as np
import pytest
from encoding import MESSAGES, PROMPT, decode, encoder, prm, split

from rlhf_core.config.supervised import TextSettings
from rlhf_core.data import arithmetic
from rlhf_core.data.encode import Encoder
from rlhf_core.data.errors import TokenError
from rlhf_core.data.shapes import convert, recognise, renamed
from rlhf_core.models.scratch import build_tokenizer as build_scratch_tokenizer


@pytest.fixture
def tokenizer(model_tokenizer):
    return model_tokenizer("chatml")


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
