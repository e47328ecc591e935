"""What is asked of a sampler and what it answers. Needs numpy alone."""

import hashlib
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SampleRequest:
    """One response to draw.

    sample_id: unique within a call; also the order in which the engine sees the requests.
    temperature: 0 is greedy; else at least 0.01. top_p: in (0, 1].
    seed: see `sample_seed`. stop_token_ids: the response ends with the first of these; nothing else stops it early.
    """

    sample_id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sample:
    """One response.

    token_ids: T tokens, with the stop token if one was sampled.
    logprobs: (T,) float32, of each token under the distribution that it was drawn from (after temperature and top_p);
    of a greedy sample, under the model's own distribution.
    finish_reason: "stop" after a stop token, "length" after max_new_tokens.
    weight_version: version of the weights that made every token of it.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: FinishReason
    weight_version: int


def sample_seed(seed: int, step: int, prompt_id: int, sample_id: int) -> int:
    """Seed of one sample in [0, 2**63): the first 63 bits of SHA-256 over the four numbers, the same on any machine."""
    digest = hashlib.sha256(struct.pack(">4q", seed, step, prompt_id, sample_id)).digest()
    return int.from_bytes(digest[:8], "big") >> 1
