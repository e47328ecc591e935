"""Asks the sampler for any number of responses, a bounded number in a call: the time limit is a call's."""

from collections.abc import Sequence

from rlhf_core.cluster.limit import Limit
from rlhf_core.cluster.workers import WorkerGroup
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.data.batches import chunks
from rlhf_core.rollout.sample import Sample, SampleRequest

# A call ends with fewer and fewer sequences in the engine: of eight waves that is little of the time.
WAVES = 8


def generate(
    sampler: WorkerGroup, requests: Sequence[SampleRequest], settings: SamplerSettings, limit: Limit
) -> list[Sample]:
    """One response a request, in their order. limit: of each call, which has as many requests as the engine takes in
    at a time, eight times over."""
    parts = chunks(requests, WAVES * settings.max_num_seqs)
    return [sample for part in parts for sample in sampler.call("generate", part, timeout_s=limit)[0]]
