import json

import pytest

from rlhf_core.data.errors import TokenError
from rlhf_core.models.scratch import build_tokenizer
from rlhf_core.rollout.prompts import Prompt, greedy_requests, load_prompts, rollout_requests

TURNS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(64)


@pytest.fixture
def rows(tmp_path):
    def write(*prompts):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt, "label": 4}) + "\n" for prompt in prompts))
        return path

    return write


def test_a_prompt_is_a_user_turn_or_a_conversation_as_transformers_renders_it(tokenizer, rows):
    prompts, dropped = load_prompts(rows("2+2=", TURNS), tokenizer, 40)
    conversations = [[{"role": "user", "content": "2+2="}], TURNS]
    rendered = [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=True, return_dict=False)
        for one in conversations
    ]
    assert [list(prompt.ids) for prompt in prompts] == rendered
    assert [prompt.text for prompt in prompts] == ["2+2=", "user: 1+1=\nassistant: 2\nuser: 2+2="]
    assert [(prompt.prompt_id, prompt.label) for prompt in prompts] == [(0, "4"), (1, "4")]
    assert dropped == 0


def test_a_policy_that_was_trained_through_a_template_is_given_its_prompts_so(tokenizer, rows):
    (prompt,), _ = load_prompts(rows("2+2="), tokenizer, 40, "#{}=")
    assert tokenizer.decode(prompt.ids) == "#2+2=="


def test_long_prompts_are_dropped_and_counted_and_some_must_be_left(tokenizer, rows):
    prompts, dropped = load_prompts(rows("2+2=", "2+2+2+2="), tokenizer, 8)
    assert [prompt.text for prompt in prompts] == ["2+2="]
    assert dropped == 1
    with pytest.raises(TokenError, match=r"all 1 prompts are longer than max_prompt_len 7 tokens .the shortest has 8"):
        load_prompts(rows("2+2="), tokenizer, 7)


def test_requests_of_later_groups_go_on_with_the_numbers_of_the_rollout():
    prompts = [Prompt(number, "", (1,), "") for number in range(3)]
    given = {"samples_per_prompt": 2, "max_new_tokens": 4, "temperature": 1.0, "seed": 5, "step": 3}
    given |= {"stop_token_ids": (2, 3)}
    whole = rollout_requests(prompts, **given)
    assert [request.sample_id for request in whole] == list(range(6))
    assert [*rollout_requests(prompts[:1], **given), *rollout_requests(prompts[1:], **given, first_group=1)] == whole


def test_requests_carry_the_tokens_that_stop_them_and_the_nucleus():
    given = {"max_new_tokens": 4, "stop_token_ids": (2, 3)}
    (greedy,) = greedy_requests([Prompt(0, "", (1,), "")], **given)
    (drawn,) = rollout_requests(
        [Prompt(0, "", (1,), "")], samples_per_prompt=1, temperature=1.0, top_p=0.9, seed=5, step=3, **given
    )
    assert greedy.stop_token_ids == drawn.stop_token_ids == (2, 3)
    assert (greedy.top_p, drawn.top_p) == (1.0, 0.9)
