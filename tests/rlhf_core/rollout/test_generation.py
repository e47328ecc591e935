from typing import Any

from rlhf_core.cluster.limit import Limit
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.rollout.generation import generate


class Answering:
    """Stands for the sampler's group: notes each call, and answers a request with itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any]] = []

    def call(self, method: str, requests: Any, *, timeout_s: Any) -> list[list[Any]]:
        assert method == "generate"
        self.calls.append((len(requests), timeout_s))
        return [list(requests)]


def test_requests_go_in_bounded_calls_each_under_the_limit():
    sampler: Any = Answering()
    requests: Any = list(range(35))
    limit = Limit(7.0, "ppo.generate_timeout_s")
    assert generate(sampler, requests, SamplerSettings(max_num_seqs=2), limit) == requests
    assert sampler.calls == [(16, limit), (16, limit), (3, limit)]
    assert all(given.setting == "ppo.generate_timeout_s" for _, given in sampler.calls)
