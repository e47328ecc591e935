import numpy as np
import pytest

from rlhf_core.config.supervised import PrmSettings, TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.errors import BadRow, TokenError
from rlhf_core.data.placeholders import place_steps, split_steps, step_ends, without_steps


def test_placeholders_stand_behind_the_steps_and_can_be_taken_out():
    ids, places = place_steps([5, 6, 7, 8, 9], [2, 3, 5], 99)
    assert ids.tolist() == [5, 6, 99, 7, 99, 8, 9, 99]
    assert places == [2, 4, 7]
    assert without_steps(ids, places).tolist() == [5, 6, 7, 8, 9]
    ids, places = place_steps(np.array([99, 5], np.int32), [1], 99)  # the placeholder may stand in the text as well
    assert ids.tolist() == [99, 99, 5]
    assert places == [1]


def test_two_steps_that_end_in_one_token_cannot_be_told_apart():
    with pytest.raises(BadRow, match="two steps end in one token"):
        place_steps([5, 6], [1, 1], 99)


def test_a_new_solution_is_scored_on_the_ids_that_training_has(model_tokenizer):
    tokenizer = model_tokenizer("chatml")
    steps = ["Step 1: 3 + 4 = 7é", "Stép 2: 🙂.", "The answer is 12"]
    settings = PrmSettings.model_validate(
        {"optimizer": {"lr": 1e-5}, "batch_size": 1, "max_len": 1000, "max_steps": 1}
        | {"placeholder_token": "<|step|>", "reward_tokens": ("+", "-")}
    )
    encoder = Encoder(tokenizer, TextSettings(), 1000)
    (trained,) = encoder.steps([{"prompt": "How?", "steps": steps, "labels": [True] * 3}], settings).items[0].samples
    (prompt,) = encoder.prompts([{"prompt": "How?"}]).items[0].samples
    response = tokenizer("\n".join(steps), add_special_tokens=False)["input_ids"]
    assert split_steps("\n".join(steps), "\n") == steps
    ends = step_ends(tokenizer, response, steps)
    ids, places = place_steps(
        [*prompt.ids, *response], [len(prompt) + end for end in ends], tokenizer.convert_tokens_to_ids("<|step|>")
    )
    assert ids.tolist() == trained.ids.tolist()
    assert places == np.flatnonzero(trained.weights).tolist()


def test_steps_that_are_not_in_the_response_are_refused(model_tokenizer):
    tokenizer = model_tokenizer("chatml")
    response = tokenizer("a\nb", add_special_tokens=False)["input_ids"]
    with pytest.raises(TokenError, match=r"step 2 \('a'\) is not in the response behind the step before it"):
        step_ends(tokenizer, response, ["b", "a"])


def test_blank_pieces_are_no_steps():
    assert split_steps("a\n\n \nb\n", "\n") == ["a", "b"]
    with pytest.raises(TokenError, match="without a separator a solution cannot be split into steps"):
        split_steps("a", "")
