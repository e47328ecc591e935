"""Where the placeholders stand in a sampled response: by hand, and as in training."""

import numpy as np
import pytest

from rlhf_core.config.supervised import PrmSettings
from rlhf_core.config.training import OptimizerSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.models.process_scorer import StepTokens
from rlhf_core.models.scratch import build_tokenizer
from rlhf_core.rollout.step_scores import judged_ids
from rlhf_core.rollout.trajectory import Trajectory, VersionSpan

PROMPT = "<s><|user|>3+4+5=<|end|><|assistant|>"
PLACEHOLDER, RIGHT, WRONG = "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(64)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    ids = tokenizer.convert_tokens_to_ids([PLACEHOLDER, RIGHT, WRONG])
    return StepTokens(ids[0], tuple(ids[1:]), ",")


def sampled(tokenizer, response):
    prompt, ids = (np.array(tokenizer(text)["input_ids"]) for text in (PROMPT, response))
    return Trajectory(
        prompt_ids=prompt,
        response_ids=ids,
        action_mask=np.ones(len(ids), dtype=bool),
        sampler_logprobs=np.zeros(len(ids), dtype=np.float32),
        version_spans=(VersionSpan(0, 0, len(ids)),),
        group_id=0,
        prompt_id=0,
        sample_id=0,
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("response", "read"),
    [
        ("3+4=7,7+5=12#12<|end|>", f"{PROMPT}3+4=7{PLACEHOLDER},7+5=12#12{PLACEHOLDER}"),
        ("3+4=7,7+5", f"{PROMPT}3+4=7{PLACEHOLDER},7+5{PLACEHOLDER}"),  # cut off
        ("3+4=7,<|end|>", f"{PROMPT}3+4=7{PLACEHOLDER}"),
        (",,3<|end|>", f"{PROMPT},,3{PLACEHOLDER}"),
        ("<|end|>", PROMPT),
        (",<|end|>", PROMPT),
    ],
)
def test_a_placeholder_stands_behind_each_step(tokenizer, tokens, response, read):
    ids, places = judged_ids(sampled(tokenizer, response), tokenizer, tokens)
    assert tokenizer.decode(ids) == read
    assert places == [number for number, one in enumerate(ids) if one == tokens.placeholder]


@pytest.mark.parametrize("steps", [["3+4=7,", "7+5=12#12"], ["3+4=7", "7+5=12#12"]])
def test_a_sampled_response_is_read_as_it_was_in_training(tokenizer, tokens, steps):
    """Whether the data's steps bring their separator along, as the demo's do, or not."""
    settings = PrmSettings(
        optimizer=OptimizerSettings(lr=1.0),
        batch_size=1,
        max_len=64,
        max_steps=1,
        placeholder_token=PLACEHOLDER,
        reward_tokens=(RIGHT, WRONG),
        separator=",",
    )
    row = {"prompt": "3+4+5=", "steps": steps, "labels": [True, False]}
    (item,) = Encoder(tokenizer, settings.text, settings.max_len).steps([row], settings).items
    ids, places = judged_ids(sampled(tokenizer, "3+4=7,7+5=12#12<|end|>"), tokenizer, tokens)
    assert item.samples[0].ids.tolist() == ids.tolist()
    assert np.flatnonzero(item.samples[0].weights).tolist() == places


def test_an_end_of_turn_that_is_not_the_eos_is_no_part_of_the_last_step(tokenizer, tokens):
    other = "<|reserved_5|>"
    ended, _ = judged_ids(sampled(tokenizer, f"3+4=7,7+5=12{other}"), tokenizer, tokens)
    plain, _ = judged_ids(sampled(tokenizer, "3+4=7,7+5=12"), tokenizer, tokens)
    assert ended.tolist() == plain.tolist()
