"""A trajectory: tokens exactly as sampled, and all that is known about them. Needs numpy alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlhf_core.rollout.sample import FinishReason, Sample, SampleRequest


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, stop) were made by the weights of `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt with P tokens and a response with R tokens; no text anywhere.

    prompt_ids: (P,) int64. response_ids: (R,) int64.
    action_mask: (R,) bool, True where the policy chose the token, False where an environment wrote it.
    sampler_logprobs: (R,) float32, 0 where action_mask is False.
    version_spans: in order, without gaps, over all of the response.
    group_id: the rollout group, unique within a rollout; equal prompts in different groups stay apart.
    prompt_id: the prompt's row in its data set. sample_id: unique within a rollout.
    rewards: raw reward by source, before weights, normalisation and shaping. scores: likewise, what groups are filtered
    by. step_scores: the probability that each step is right, step_ends: where in the response each step's last token
    is; both of the process reward model, () without one.
    model_inputs: further arrays that the model takes, empty for text.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    action_mask: np.ndarray
    sampler_logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    group_id: int
    prompt_id: int
    sample_id: int
    finish_reason: FinishReason
    rewards: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    step_scores: tuple[float, ...] = ()
    step_ends: tuple[int, ...] = ()
    model_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        if len(self.action_mask) != length or len(self.sampler_logprobs) != length:
            raise ValueError(
                f"sample {self.sample_id}: {length} response tokens, {len(self.action_mask)} action-mask entries and "
                f"{len(self.sampler_logprobs)} log-probs; the three must have one length"
            )
        ends = [0, *(span.stop for span in self.version_spans)]
        if [span.start for span in self.version_spans] != ends[:-1] or ends[-1] != length:
            raise ValueError(
                f"sample {self.sample_id}: {length} response tokens are not covered in order and without gaps by "
                f"{self.version_spans}"
            )


def single_turn(request: SampleRequest, sample: Sample, *, group_id: int, prompt_id: int) -> Trajectory:
    """The trajectory of one prompt and one response: every response token is an action. No rewards yet."""
    if request.sample_id != sample.sample_id:
        raise ValueError(f"sample {sample.sample_id} does not answer request {request.sample_id}")
    length = len(sample.token_ids)
    return Trajectory(
        prompt_ids=np.asarray(request.prompt_ids, dtype=np.int64),
        response_ids=np.asarray(sample.token_ids, dtype=np.int64),
        action_mask=np.ones(length, dtype=bool),
        sampler_logprobs=sample.logprobs,
        version_spans=(VersionSpan(sample.weight_version, 0, length),),
        group_id=group_id,
        prompt_id=prompt_id,
        sample_id=sample.sample_id,
        finish_reason=sample.finish_reason,
    )
