"""Steps of solutions: placeholders, labels, cuts, and rows that no step can be learned from."""

import json

import numpy as np
import pyarrow.parquet
import pytest
from encoding import PROMPT, STEPS, decode, encoder, prm

from rlhf_core.config.data import DataSource
from rlhf_core.data.errors import TokenError
from rlhf_core.data.loading import load_data
from rlhf_core.data.placeholders import split_steps


@pytest.fixture
def tokenizer(model_tokenizer):
    return model_tokenizer("chatml")


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
