import json

import pytest

from rlhf_core.rollout.verifiers import exact


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        ("3+4=7#7", "7", 1.0),
        ("3+4=7# 7 ", "7", 1.0),
        ("so he has 1,250 left.\n#### 1,250", "1250", 1.0),
        ("so 72.\n#### 72", "A worked solution.\n#### 72", 1.0),
        ("3+4=7#8", "7", 0.0),
        ("3+4=7", "7", 0.0),
        ("7", "7", 0.0),
        ("3+4=7#7#7", "7", 0.0),
        ("#17", "7", 0.0),
        ("#7.0", "7", 0.0),
        ("#07", "7", 0.0),
        ("", "7", 0.0),
        ("#", "7", 0.0),
    ],
)
def test_one_marked_answer_that_equals_the_label(completion, label, score):
    assert exact(completion, label) == score


def test_gsm8k_solutions_verify_against_themselves_and_not_against_each_other(test_data):
    lines = (test_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:300]
    answers = [json.loads(line)["answer"] for line in lines]
    assert all(exact(answer, answer) == 1.0 for answer in answers)
    finals = [answer.split("####")[1].strip().replace(",", "") for answer in answers]
    for answer, final, other in zip(answers[:-1], finals[:-1], finals[1:], strict=True):
        assert exact(answer, other) == float(final == other)
