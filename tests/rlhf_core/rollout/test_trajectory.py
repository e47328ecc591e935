import dataclasses

import numpy as np
import pytest

from rlhf_core.rollout.sample import Sample, SampleRequest
from rlhf_core.rollout.trajectory import Trajectory, VersionSpan, single_turn

REQUEST = SampleRequest(11, (1, 5, 6), 8, 1.0, 1.0, 3, (2,))
SAMPLE = Sample(11, (9, 4, 2), np.array([-0.5, -1.5, -0.25], np.float32), "stop", 6)


def test_a_single_turn_keeps_the_tokens_as_sampled_with_the_stop_token():
    t = single_turn(REQUEST, SAMPLE, group_id=5, prompt_id=2)
    assert t.prompt_ids.tolist() == [1, 5, 6]
    assert t.prompt_ids.dtype == np.int64
    assert t.response_ids.tolist() == [9, 4, 2]
    assert t.action_mask.tolist() == [True, True, True]
    assert t.action_mask.dtype == np.bool_
    assert t.sampler_logprobs.tolist() == [-0.5, -1.5, -0.25]
    assert t.version_spans == (VersionSpan(6, 0, 3),)
    assert (t.group_id, t.prompt_id, t.sample_id, t.finish_reason) == (5, 2, 11, "stop")
    assert t.rewards == {}
    assert t.model_inputs == {}


def test_a_sample_of_another_request_is_refused():
    with pytest.raises(ValueError, match="sample 11 does not answer request 12"):
        single_turn(dataclasses.replace(REQUEST, sample_id=12), SAMPLE, group_id=0, prompt_id=0)


@pytest.mark.parametrize("field", ["action_mask", "sampler_logprobs"])
def test_arrays_of_another_length_are_refused(field: str):
    whole = single_turn(REQUEST, SAMPLE, group_id=0, prompt_id=0)
    with pytest.raises(ValueError, match=r"3 response tokens.*must have one length"):
        dataclasses.replace(whole, **{field: getattr(whole, field)[:1]})


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (VersionSpan(6, 0, 2),),
        (VersionSpan(6, 0, 1), VersionSpan(7, 2, 3)),
        (VersionSpan(7, 1, 3), VersionSpan(6, 0, 1)),
    ],
    ids=["none", "short", "gap", "out of order"],
)
def test_spans_have_to_cover_the_response(spans: tuple[VersionSpan, ...]):
    whole = single_turn(REQUEST, SAMPLE, group_id=0, prompt_id=0)
    with pytest.raises(ValueError, match="not covered"):
        dataclasses.replace(whole, version_spans=spans)


def test_spans_of_two_versions_are_kept():
    whole = single_turn(REQUEST, SAMPLE, group_id=0, prompt_id=0)
    spans = (VersionSpan(6, 0, 1), VersionSpan(7, 1, 3))
    changed: Trajectory = dataclasses.replace(whole, version_spans=spans)
    assert changed.version_spans == spans
