"""What is trained on is the assistant's content and its end marker, under the chat templates of real models.

Expected texts are written by hand from each template's definition; ids and marks come from transformers' own
apply_chat_template.
"""

import copy
import random
from itertools import groupby

import pytest

from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.errors import TokenError

DATE = "26 Jul 2024"  # for templates that write today's unless told
EMPTY_THINK = "<think>\n\n</think>\n\n"
# Template to (what it does to a content, what follows it, what it puts before that the model has to say itself).
TEMPLATES = {
    "chatml": (str, "<|im_end|>", ""),
    "mistral": (str, "</s>", " "),
    "qwen2_5": (str, "<|im_end|>", ""),
    "qwen2_5_training": (str, "<|im_end|>", ""),
    "qwen3": (lambda content: content.lstrip("\n"), "<|im_end|>", ""),
    "qwen3_training": (lambda content: content.lstrip("\n"), "<|im_end|>", ""),
    "llama3": (str.strip, "<|eot_id|>", ""),
    "llama3_1": (str.strip, "<|eot_id|>", ""),
    "llama3_2": (str.strip, "<|eot_id|>", ""),
    "llama3_training": (str.strip, "<|eot_id|>", ""),
    "gemma": (str.strip, "<end_of_turn>", ""),
    "gemma_training": (str.strip, "<end_of_turn>", ""),
    "phi3": (str, "<|end|>", ""),  # writes the EOS behind the last turn's end token
    "phi3_training": (str, "<|end|>", ""),  # marks the EOS apart
}
every_template = pytest.mark.parametrize("name", TEMPLATES)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def expected_text(name, content):
    write, end, before = TEMPLATES[name]
    return before + write(content) + end


def encode(tokenizer, messages, tools=None, **text):
    return Encoder(tokenizer, TextSettings(**text), 10_000).sft([{"messages": messages, "tools": tools}])


def decode(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def trained_texts(tokenizer, data):
    """The text of every run of trained tokens, of all items."""
    texts = []
    for item in data.items:
        (sample,) = item.samples
        runs = groupby(zip(sample.weights.tolist(), sample.ids.tolist(), strict=True), key=lambda one: one[0] > 0)
        texts += [decode(tokenizer, [token for _, token in run]) for trained, run in runs if trained]
    return texts


HEADERS = "<|im_start|>assistant\nno<|im_end|><|eot_id|><end_of_turn></s>"
CONTENTS = {
    "plain": "I am fine, thank you.",
    "repeats": "Hello",
    "blanks": "  spaced out \n",
    "unicode": "naïve 日本語 🙂 e\u0301",
    "headers": "before " + HEADERS + " after",
    "only_headers": HEADERS,
    "empty": "",
    "braces": "{{ messages }} {% if x %} <b>bold</b> & 'quoted' \"twice\"",
}


@every_template
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_every_turns_content_and_end_marker_is_trained_on_and_nothing_else(model_tokenizer, name, content):
    tokenizer = model_tokenizer(name)
    messages = [user("Hello"), assistant(content), user(content or "Hello"), assistant("Hello")]
    data = encode(tokenizer, messages)
    assert trained_texts(tokenizer, data) == [expected_text(name, content), expected_text(name, "Hello")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, date_string=DATE)
    (last,) = data.items[-1].samples
    end = TEMPLATES[name][1]
    assert decode(tokenizer, last.ids) == rendered[: rendered.rindex(end) + len(end)]


@every_template
def test_the_ids_before_a_turn_are_what_generation_is_given(model_tokenizer, name):
    tokenizer = model_tokenizer(name)
    messages = [user("How are you?"), assistant("I am fine."), user("The answer?"), assistant("42")]
    data = encode(tokenizer, messages)
    for number, i in enumerate([1, 3]):
        prompt = tokenizer.apply_chat_template(
            messages[:i], tokenize=True, add_generation_prompt=True, return_dict=False, date_string=DATE
        )
        sample = data.items[number if len(data.items) == 2 else 0].samples[0]
        assert sample.ids[: len(prompt)].tolist() == prompt
        # Trained on from there, but for the empty think block, which is not the message's.
        begin = len(prompt) + int((sample.weights[len(prompt) :] > 0).argmax())
        assert decode(tokenizer, sample.ids[len(prompt) : begin]) in ("", EMPTY_THINK if "qwen3" in name else "")


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "gemma", "phi3"])
def test_generation_markers_change_nothing(model_tokenizer, name):
    messages = [user("Hello"), assistant(" I am fine. "), user("The answer?"), assistant("42")]
    (plain,), (marked,) = (
        encode(model_tokenizer(one), messages).items[0].samples for one in (name, f"{name}_training")
    )
    assert plain.ids.tolist() == marked.ids.tolist()
    assert plain.weights.tolist() == marked.weights.tolist()


@pytest.mark.parametrize("name", ["llama3_training", "qwen2_5_training", "qwen3_training", "gemma_training"])
def test_what_is_trained_on_lies_within_the_templates_own_markers(model_tokenizer, name):
    """transformers' mask of the markers holds, beyond our turns, only white space and the empty think block."""
    tokenizer = model_tokenizer(name)
    messages = [user("Hello"), assistant("I am fine."), user("The answer?"), assistant("42")]
    (sample,) = encode(tokenizer, messages).items[0].samples
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ours = (sample.weights > 0).tolist() + [False] * (len(theirs["input_ids"]) - len(sample))
    triples = list(zip(theirs["input_ids"], theirs["assistant_masks"], ours, strict=True))
    assert all(mask for _, mask, trained in triples if trained)
    beyond = decode(tokenizer, [token for token, mask, trained in triples if mask and not trained])
    assert beyond.replace("<think>", "").replace("</think>", "").strip() == ""


@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_training", "qwen3_training", "llama3_1", "llama3_2"])
def test_tool_calls_are_trained_on_and_their_results_are_not(model_tokenizer, name):
    tokenizer = model_tokenizer(name)
    messages = [
        user("The weather?"),
        assistant("", tool_calls=[call("weather", city="Köln")]),
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "rain"},
        assistant("It rains."),
    ]
    data = encode(tokenizer, messages, TOOLS)
    said = '{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>'
    if "qwen" in name:
        said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>'
    assert trained_texts(tokenizer, data) == [said, expected_text(name, "It rains.")]
    assert len(data.items) == 1
    (sample,) = data.items[0].samples
    written = "<tool_response>\nrain\n</tool_response>" if "qwen" in name else '<|end_header_id|>\n\n"rain"<|eot_id|>'
    assert decode(tokenizer, sample.ids).count(written) == 2


def test_a_tool_call_behind_content(model_tokenizer):
    tokenizer = model_tokenizer("qwen3")
    messages = [
        user("Weather?"),
        assistant("I look.", tool_calls=[call("weather", city="A"), call("weather", city="B")]),
    ]
    (text,) = trained_texts(tokenizer, encode(tokenizer, messages, TOOLS))
    calls = [
        f'\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in ("A", "B")
    ]
    assert text == "I look." + "".join(calls) + "<|im_end|>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Writes calls before content.
        ("gemma4_v2", '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|><turn|>'),
        # Writes content beside a call otherwise than content alone.
        ("gptoss", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'),
    ],
)
def test_tool_calls_in_the_form_of_other_templates(model_tokenizer, name, expected):
    tokenizer = model_tokenizer(name)
    messages = [user("The weather?"), assistant("", tool_calls=[call("weather", city="Rome")])]
    assert trained_texts(tokenizer, encode(tokenizer, messages, TOOLS)) == [expected]


THINKING = [
    user("Hello"),
    assistant("Fine.", reasoning_content="They greet."),
    user("The answer?"),
    assistant("42", reasoning_content="It is known."),
]


def test_a_template_that_drops_earlier_reasoning_gives_each_turn_its_own_sequence(model_tokenizer):
    tokenizer = model_tokenizer("qwen3")
    data = encode(tokenizer, THINKING)
    assert data.report.unrolled == 1
    assert trained_texts(tokenizer, data) == [
        "<think>\nThey greet.\n</think>\n\nFine.<|im_end|>",
        "<think>\nIt is known.\n</think>\n\n42<|im_end|>",
    ]
    first, second = (decode(tokenizer, item.samples[0].ids) for item in data.items)
    assert (
        first
        == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\nThey greet.\n</think>\n\nFine.<|im_end|>"
    )
    assert "They greet." not in second
    assert second.startswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>\n<|im_start|>user"
    )


def test_a_template_that_keeps_reasoning_trains_all_turns_in_one_sequence(model_tokenizer):
    tokenizer = model_tokenizer("qwen3_training")
    data = encode(tokenizer, THINKING)
    assert len(data.items) == 1
    assert trained_texts(tokenizer, data) == [
        "<think>\nThey greet.\n</think>\n\nFine.<|im_end|>",
        "<think>\nIt is known.\n</think>\n\n42<|im_end|>",
    ]


def test_reasoning_between_tool_calls_stays_in_one_sequence(model_tokenizer):
    """Within the answer to one query Qwen 3 keeps its reasoning."""
    tokenizer = model_tokenizer("qwen3")
    messages = [
        user("The weather?"),
        assistant("", reasoning_content="I look.", tool_calls=[call("weather", city="Rome")]),
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "wind"},
        assistant("Sun and wind.", reasoning_content="Both."),
    ]
    data = encode(tokenizer, messages, TOOLS)
    assert len(data.items) == 1
    assert trained_texts(tokenizer, data) == [
        '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        "<|im_end|>",
        "<think>\nBoth.\n</think>\n\nSun and wind.<|im_end|>",
    ]


def test_reasoning_written_into_the_content(model_tokenizer):
    tokenizer = model_tokenizer("qwen3")
    data = encode(tokenizer, [user("Hello"), assistant("<think>They greet.</think>Fine.")])
    assert trained_texts(tokenizer, data) == ["<think>\nThey greet.\n</think>\n\nFine.<|im_end|>"]


def test_white_space_inside_a_think_block_is_the_messages_own(model_tokenizer):
    tokenizer = model_tokenizer("qwen3")
    content = "<think>\n1.\n  They greet.\n</think>\n\nif x:\n    y"
    data = encode(tokenizer, [user("Hello"), assistant(content)])
    assert trained_texts(tokenizer, data) == [content + "<|im_end|>"]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "content.split('</think>')[-1]", "' '.join(content.split('</think>')[-1].split())"
    )
    assert "' '.join(" in tokenizer.chat_template
    with pytest.raises(TokenError, match="something else"):
        encode(tokenizer, [user("Hello"), assistant(content)])


def test_reasoning_that_the_generation_prompt_begins(model_tokenizer):
    """The prompt of this template ends with `<think>`, so what is left to say begins behind it."""
    tokenizer = model_tokenizer("qwen3_5_think")
    for message in (assistant("<think>They greet.</think>Fine."), assistant("Fine.", reasoning_content="They greet.")):
        data = encode(tokenizer, [user("Hello"), message])
        assert trained_texts(tokenizer, data) == ["They greet.\n</think>\n\nFine.<|im_end|>"]


def test_reasoning_that_the_template_does_not_know_is_counted(model_tokenizer):
    tokenizer = model_tokenizer("llama3")
    data = encode(tokenizer, THINKING)
    assert trained_texts(tokenizer, data) == ["Fine.<|eot_id|>", "42<|eot_id|>"]
    assert data.report.unreasoned == 2
    assert encode(model_tokenizer("qwen3"), THINKING).report.unreasoned == 0


def test_weights_are_the_messages_own(model_tokenizer):
    tokenizer = model_tokenizer("chatml")
    messages = [user("a"), assistant("b", weight=0), user("c"), assistant("d", weight=0.5), user("e"), assistant("f")]
    data = encode(tokenizer, messages)
    assert trained_texts(tokenizer, data) == ["d<|im_end|>", "f<|im_end|>"]
    (sample,) = data.items[0].samples
    assert sorted(set(sample.weights.tolist())) == [0.0, 0.5, 1.0]
    last = encode(tokenizer, messages, train_on="last")
    assert trained_texts(tokenizer, last) == ["f<|im_end|>"]
    with pytest.raises(TokenError, match=r"row 1: message 2 has the weight -1; give 0 or more"):
        encode(tokenizer, [user("a"), assistant("b", weight=-1)])


def test_the_date_that_a_template_writes_does_not_change_from_day_to_day(model_tokenizer):
    tokenizer = model_tokenizer("llama3_2")
    (sample,) = encode(tokenizer, [user("a"), assistant("b")]).items[0].samples
    assert "Today Date: 26 Jul 2024" in decode(tokenizer, sample.ids)


BODY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BROKEN = {
    "writes another prompt": (
        BODY + "{% if add_generation_prompt %}<|im_start|>bot\n{% endif %}",
        "renders the prompt otherwise once a response follows",
    ),
    "no end token": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "does not end a response with the tokenizer's eos '<|im_end|>'",
    ),
    "drops half": (BODY.replace("m.content }}", "m.content[:5] }}") + GENERATE, "lost|something else"),
    "writes twice": (BODY.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}") + GENERATE, "2 times"),
    "upper case": (
        BODY.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else m.content | upper }}") + GENERATE,
        "0 times|something else",
    ),
    "loses users": (
        "{% for m in messages %}{% if m.role == 'assistant' or loop.first %}<|im_start|>{{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
        r"message 3 \(user\) is lost",
    ),
    "marks the user too": (
        BODY.replace("<|im_start|>", "{% generation %}<|im_start|>").replace(
            "{% endfor", "{% endgeneration %}{% endfor"
        )
        + GENERATE,
        "generation markers enclose",
    ),
    "marks nothing": (
        BODY.replace(
            "{{ m.content", "{% if m.role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}{{ m.content"
        )
        + GENERATE,
        "generation markers enclose",
    ),
    **{
        f"white space inside: {change}": (
            BODY.replace("m.content", f"m.content if m.role == 'user' else {change}") + GENERATE,
            "0 times|something else",
        )
        for change in (
            "m.content.split() | join(' ')",
            "m.content | replace('\\n', ' ')",
            "m.content | replace(' ', '')",
            "m.content | wordwrap(12)",
            "m.content | indent(4)",
        )
    },
    "fails": ("{{ raise_exception('not like this') }}", "refuses the conversation: not like this"),
}


@pytest.mark.parametrize(("template", "message"), BROKEN.values(), ids=BROKEN)
def test_a_template_whose_spans_cannot_be_established_is_refused(make_tokenizer, template, message):
    tokenizer = make_tokenizer(None, "<|im_end|>")
    tokenizer.chat_template = template
    known = "It is known:\n  42  43"
    messages = [user("How are you?"), assistant("I am fine."), user("The answer?"), assistant(known)]
    with pytest.raises(TokenError, match=f"row 1: message .*({message})"):
        encode(tokenizer, messages)


def test_the_broken_templates_are_right_but_for_their_fault(make_tokenizer):
    tokenizer = make_tokenizer(None, "<|im_end|>")
    tokenizer.chat_template = BODY + GENERATE
    data = encode(tokenizer, [user("How are you?"), assistant("I am fine.")])
    assert trained_texts(tokenizer, data) == ["I am fine.<|im_end|>"]


def test_a_template_that_loses_a_tool_message_is_refused(make_tokenizer):
    tokenizer = make_tokenizer(None, "<|im_end|>")
    keeps_last = "{% if m.role != 'tool' or loop.nextitem is undefined or loop.nextitem.role != 'tool' %}"
    body = BODY.replace("<|im_start|>", keeps_last + "<|im_start|>").replace("{% endfor", "{% endif %}{% endfor")
    tokenizer.chat_template = body + GENERATE
    tool = {"role": "tool", "content": "rain"}
    messages = [user("Weather?"), assistant("I look."), tool, tool, assistant("Rain, rain.")]
    with pytest.raises(TokenError, match=r"message 5 \(assistant\): message 4 \(tool\) is lost"):
        encode(tokenizer, messages)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_a_template_without_tool_calls_refuses_them(model_tokenizer, name):
    messages = [user("Weather?"), assistant("", tool_calls=[call("weather", city="Rome")])]
    with pytest.raises(TokenError, match="leaves out the tool call weather; give one that knows tool calls"):
        encode(model_tokenizer(name), messages, TOOLS)


def test_content_beside_a_tool_call_that_the_template_drops_is_refused(model_tokenizer):
    messages = [user("Weather?"), assistant("I look.", tool_calls=[call("weather", city="Rome")])]
    with pytest.raises(TokenError, match="writes the content of this turn 0 times, and must once"):
        encode(model_tokenizer("llama3_1"), messages, TOOLS)


def test_a_turn_that_opens_the_conversation_is_context(model_tokenizer):
    """As in ShareGPT's data: nothing stands before it that it could answer."""
    tokenizer = model_tokenizer("chatml")
    messages = [assistant("Welcome."), user("Hello"), assistant("Fine.")]
    data = encode(tokenizer, messages)
    assert trained_texts(tokenizer, data) == ["Fine.<|im_end|>"]
    assert decode(tokenizer, data.items[0].samples[0].ids).startswith("<|im_start|>assistant\nWelcome.<|im_end|>")
    with pytest.raises(TokenError, match="no assistant turn to train on"):
        encode(tokenizer, messages[:1])
    pair = {"prompt": [], "chosen": "a", "rejected": "b"}
    with pytest.raises(TokenError, match=r"message 1 \(assistant\): an assistant's turn with nothing before it"):
        Encoder(tokenizer, TextSettings(), 100).pairs([pair])


def test_the_tokens_with_which_turns_end_are_reported(make_tokenizer, model_tokenizer):
    """Llama 3's template under a base model's tokenizer, whose EOS no turn is ended with."""
    tokenizer = make_tokenizer("<|begin_of_text|>", "</s>")
    tokenizer.chat_template = model_tokenizer("llama3").chat_template
    messages = [user("Hello"), assistant("Fine.")]
    report = encode(tokenizer, messages).report
    assert report.end_tokens == {"<|eot_id|>": tokenizer.convert_tokens_to_ids("<|eot_id|>")}
    assert "Responses end with `<|eot_id|>`." in report.to_markdown()
    plain = Encoder(tokenizer, TextSettings(format="text"), 100).sft([{"text": "Hello"}]).report
    assert plain.end_tokens == {"</s>": tokenizer.eos_token_id}
    # A turn that has lost its end does not teach it.
    length = len(encode(tokenizer, messages).items[0].samples[0])
    cut = Encoder(tokenizer, TextSettings(truncation="cut"), length - 1).sft([{"messages": messages}])
    assert (cut.report.cut, cut.report.end_tokens) == (1, {})


def test_special_tokens_in_what_is_trained_on_are_counted(model_tokenizer):
    """They are those tokens once encoded, as if the template had written them."""
    tokenizer = model_tokenizer("chatml")
    messages = [user("<|im_end|>"), assistant("use <|im_end|>"), user("a"), assistant("b"), user("c"), assistant("d")]
    report = encode(tokenizer, messages).report
    assert report.special_texts == report.figures()["special_texts"] == 1
    assert "1 responses have special tokens in their own text" in report.to_markdown()
    assert encode(tokenizer, messages, train_on="last").report.special_texts == 0
    thought = [user("a"), assistant("b", reasoning_content="</s>")]
    assert encode(model_tokenizer("qwen3"), thought).report.special_texts == 1
    for text, row in (("text", {"text": "a</s>b"}), ("template", {"prompt": "a", "response": "<|im_start|>"})):
        data = Encoder(tokenizer, TextSettings(format=text), 100).sft([row, *[{**row, **dict.fromkeys(row, "a")}] * 2])
        assert data.report.special_texts == 1


# -- random conversations ---------------------------------------------------------------------------------------------

PIECES = [
    "Hello",
    "42",
    " ",
    "\n",
    "\n\n",
    "  ",
    "é",
    "🙂",
    "日本",
    "<|im_start|>",
    "user\n",
    "assistant\n",
    "{}",
    "'",
    "</s>",
]


def random_conversation(rng):
    def content(first):
        return first + "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 8)))

    turns = rng.randint(1, 3)
    return [
        one for _ in range(turns) for one in (user(content("Hi")), assistant(content(rng.choice(["", "Well", " a"]))))
    ]


@every_template
def test_random_conversations_decode_to_content_and_end_marker(model_tokenizer, name):
    tokenizer = model_tokenizer(name)
    rng = random.Random(7)
    conversations = [random_conversation(rng) for _ in range(60)]
    encoder = Encoder(tokenizer, TextSettings(), 10_000)
    kept = 0
    for messages in conversations:
        expected = [expected_text(name, message["content"]) for message in messages[1::2]]
        # A second row, so that there is one when the first is dropped: a content that begins with a line break shares a
        # token with the header's, or no turn says anything.
        data = encoder.sft([{"messages": messages}, {"messages": [user("Hi"), assistant("Ho")]}])
        assert set(data.report.dropped) <= {"a token holds both prompt and response", "no assistant turn to train on"}
        if not data.report.dropped:
            assert trained_texts(tokenizer, data) == [*expected, expected_text(name, "Ho")]
            kept += 1
    assert kept > 40
