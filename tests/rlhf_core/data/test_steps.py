import math

import pytest

from rlhf_core.data.errors import BadRow
from rlhf_core.data.steps import read_marked_steps, read_steps

# The form of Math-Shepherd's rows (Wang et al. 2023, section 4), written by hand.
TEXT = "Ann has 2 pens and buys 3. How many? Step 1: 2 + 3 = 5. ки\nStep 2: The answer is: 6 ки"
CANONICAL = {
    "prompt": "Ann has 2 pens and buys 3. How many?",
    "steps": ["Step 1: 2 + 3 = 5.", "Step 2: The answer is: 6"],
    "labels": [True, False],
}


@pytest.mark.parametrize(
    "labels",
    [
        "Ann has 2 pens and buys 3. How many? Step 1: 2 + 3 = 5. +\nStep 2: The answer is: 6 -",
        ["+", "-"],
        [True, False],
        [1, 0],
    ],
)
def test_marked_steps(labels):
    assert read_marked_steps(TEXT, labels, "ки") == CANONICAL


def test_marked_steps_with_soft_labels_another_marker_or_a_prompt_of_their_own():
    assert read_marked_steps(TEXT, [0.75, 0.0], "ки")["labels"] == [0.75, 0.0]
    assert read_marked_steps(TEXT.replace("ки", "<step>"), ["+", "-"], "<step>") == CANONICAL
    solution = "2 + 3 = 5. ки\n6 ки"
    wanted = {"prompt": "Ann?", "steps": ["2 + 3 = 5.", "6"], "labels": [True, False]}
    assert read_marked_steps(solution, ["+", "-"], "ки", "Ann?") == wanted
    assert read_marked_steps("Ann? " + solution, ["+", "-"], "ки", "Ann?") == wanted


@pytest.mark.parametrize(
    ("text", "labels", "reason"),
    [
        (7, ["+"], "column input is not text"),
        ("Ann? Step 1: 5.", "Ann? Step 1: 5.", "no step is marked: 'ки' is not in the text; set step_marker"),
        ("Ann? Step 1: 5. ки and so on", ["+"], "text after the last step's marker: str ' and so on'"),
        ("Ann? 5. ки", ["+"], 'no prompt before "Step 1"'),
        ("Step 1: 5. ки", ["+"], 'no prompt before "Step 1"'),
        ("Ann? Step 1: 5. ки ки", ["+", "+"], "a step is empty"),
        ("Ann? Step 1: 5. ки", ["+", "-"], "as many labels as steps are needed: 1 steps and 2 labels"),
        ("Ann? Step 1: 5. ки", [7], "column labels is not a list of booleans, numbers from 0 to 1, reward tokens"),
        ("Ann? Step 1: 5. ки", 1, "column labels is not a list of booleans, numbers from 0 to 1, reward tokens and"),
        ("Ann? Step 1: 5. ки", "Ann? Step 1: 6. +", "label is not the text with + or - for each marker: they part in"),
        ("Ann? Step 1: 5. ки", "Ann? Step 1: 5. x", "label is not the text with + or - for each marker"),
        ("Ann? Step 1: 5. ки", "Ann? Step 1: 5. +-", "label is not the text with + or - for each marker"),
        ("Ann? Step 1: 5. ки", "Ann? Step 1: 5. ", "label is not the text with + or - for each marker"),
    ],
)  # fmt: skip
def test_marked_steps_that_cannot_be_used(text, labels, reason):
    with pytest.raises(BadRow) as caught:
        read_marked_steps(text, labels, "ки")
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("steps", "labels", "reason"),
    [
        ("one", [1], "column steps is not a list of strings: str 'one'"),
        (["a", 1], [1, 1], "column steps is not a list of strings"),
        (["a", ""], [1, 1], "a step is empty"),
        (["a"], [["+"]], "column labels is not a list of booleans, numbers from 0 to 1, reward tokens and nulls: "),
        (["a"], [math.inf], "column labels is not a list of booleans, numbers from 0 to 1, reward tokens and nulls"),
        (
            ["a", "b"],
            [1, -100],
            "column labels is not a list of booleans, numbers from 0 to 1, reward tokens and nulls",
        ),
        (["a", "b"], [None, math.nan], "no step has a label"),
        (["a", "b"], [True], "as many labels as steps are needed: 2 steps and 1 labels"),
    ],
)
def test_steps_that_cannot_be_used(steps, labels, reason):
    with pytest.raises(BadRow) as caught:
        read_steps(steps, labels, "steps")
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("labels", "read"),
    [
        ([None, 1], [None, True]),
        ([math.nan, 1.0, 0], [None, 1.0, 0.0]),
        (["?", None, "+"], ["?", None, "+"]),
        (["", "-", True], [None, "-", True]),
        ([0.25, "+", 1], [0.25, "+", 1.0]),
    ],
)
def test_steps_without_a_label_and_labels_that_are_reward_tokens(labels, read):
    row = read_steps(["a", "b", "c"][: len(labels)], labels, "steps")
    assert row["labels"] == read
    assert [type(one) for one in row["labels"]] == [type(one) for one in read]


def test_marked_steps_with_other_reward_tokens_and_without_labels():
    assert read_marked_steps(TEXT, ["+", "?"], "ки")["labels"] == [True, "?"]
    assert read_marked_steps(TEXT, [None, "-"], "ки")["labels"] == [None, False]
