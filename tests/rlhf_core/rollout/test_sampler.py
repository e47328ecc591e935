"""The sampler on a real vLLM engine, held against Hugging Face on the same tokens and weights.

Engines live in processes of their own, since their environment has to be set before torch is imported. `server` is the
process of the one engine that most tests share, `second` one in which a test starts and closes engines as it likes.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing import get_context
from multiprocessing.managers import BaseManager, RemoteError
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.rollout.environment import sampler_environment
from rlhf_core.rollout.sampler import (
    EngineBroken,
    Sample,
    Sampler,
    SampleRequest,
    SamplerError,
    sample_seed,
)
from rlhf_core.rollout.weight_transfer import WeightTransferError

pytestmark = pytest.mark.engines

Send = Callable[[Mapping[str, torch.Tensor], int], Path]
FP32 = SamplerSettings(dtype="float32", max_model_len=64, max_num_seqs=32, kv_cache_gib=0.0625)
BF16 = FP32.model_copy(update={"dtype": "bfloat16"})
FP32_LARGEST, BF16_MEAN = 1e-3, 0.02

BaseManager.register("Sampler", Sampler, exposed=("generate", "update_weights", "check", "close"))
BaseManager.register("patch", patch)


@contextmanager
def process() -> Iterator[Any]:
    environment = sampler_environment()
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    manager = BaseManager(ctx=get_context("spawn"))
    manager.start()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    with manager:
        yield manager


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with process() as manager:
        yield manager


@pytest.fixture(scope="module")
def second() -> Iterator[Any]:
    with process() as manager:
        yield manager


@pytest.fixture(scope="module")
def shared(server: Any, untied: Any) -> Iterator[Any]:
    with closing(server.Sampler(untied.directory, FP32, seed=0)) as sampler:
        yield sampler


@pytest.fixture
def sampler(shared: Any, untied: Any, send: Send) -> Any:
    """The shared engine with the weights of seed 0, those of the directory, as version 0."""
    shared.update_weights(send(untied.weights(seed=0), 0))
    return shared


def requests(count: int = 48, **change: Any) -> list[SampleRequest]:
    """More than the engine decodes at a time, so that some wait; prompts of 3 to 15 tokens."""
    rng = np.random.default_rng(7)
    made = []
    for i in range(count):
        prompt = tuple(int(token) for token in rng.integers(3, 64, 3 + i % 13))
        fields = {
            "max_new_tokens": 24,
            "temperature": 1.0,
            "top_p": 1.0,
            "seed": sample_seed(0, 0, i, i),
            "stop_token_ids": (),
        }
        made.append(SampleRequest(sample_id=i, prompt_ids=prompt, **(fields | change)))
    return made


def reference_logits(model: Any, request: SampleRequest, sample: Sample) -> torch.Tensor:
    """(T, vocabulary) float32: Hugging Face's logits from which each sampled token would be drawn."""
    ids = torch.tensor([[*request.prompt_ids, *sample.token_ids]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float()
    return logits[len(request.prompt_ids) - 1 : -1]


def logprob_differences(model: Any, asked: Sequence[SampleRequest], samples: Sequence[Sample]) -> np.ndarray:
    """|sampler's - Hugging Face's| log-prob of every sampled token."""
    found = []
    for request, sample in zip(asked, samples, strict=True):
        logprobs = torch.log_softmax(reference_logits(model, request, sample) / (request.temperature or 1.0), -1)
        expected = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        found.append(np.abs(expected.numpy() - sample.logprobs))
    return np.concatenate(found)


def bits(samples: Sequence[Sample]) -> list[tuple[Any, ...]]:
    return [(s.sample_id, s.token_ids, s.logprobs.tobytes(), s.finish_reason) for s in samples]


def test_fp32_parity_after_every_transfer(sampler: Any, untied: Any, send: Send, record_property: Any):
    old, new = untied.weights(seed=0), untied.weights(seed=1)
    asked = requests()
    first = sampler.generate(asked)
    largest = [logprob_differences(untied.model(old), asked, first).max()]
    report = sampler.update_weights(send(new, 5))
    changed = sampler.generate(asked)
    largest.append(logprob_differences(untied.model(new), asked, changed).max())
    sampler.update_weights(send(old, 6))
    back = sampler.generate(asked)
    largest.append(logprob_differences(untied.model(old), asked, back).max())
    record_property("fp32_largest_logprob_difference", [float(value) for value in largest])
    assert max(largest) < FP32_LARGEST
    assert report.version == 5
    assert report.bytes > sum(4 * tensor.numel() for tensor in new.values())
    assert [{s.weight_version for s in samples} for samples in (first, changed, back)] == [{0}, {5}, {6}]
    assert bits(changed) != bits(first) == bits(back)


def test_parity_sees_any_one_stale_tensor(sampler: Any, untied: Any, send: Send):
    old, new = untied.weights(seed=0), untied.weights(seed=1)
    model, asked = untied.model(new), requests(8)
    unseen = {}
    for name in new:
        sampler.update_weights(send({**new, name: old[name]}, 1))
        largest = logprob_differences(model, asked, sampler.generate(asked)).max()
        if largest <= FP32_LARGEST:
            unseen[name] = largest
    assert len(new) == 21
    assert unseen == {}


def test_a_refused_transfer_leaves_weights_and_version(sampler: Any, untied: Any, send: Send):
    asked = requests(8)
    before = sampler.generate(asked)
    weights = untied.weights(seed=1)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightTransferError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        sampler.update_weights(send(weights, 9))
    after = sampler.generate(asked)
    assert bits(after) == bits(before)
    assert {sample.weight_version for sample in after} == {0}


def test_the_same_call_gives_the_same_bits_and_keeps_the_order_asked(sampler: Any):
    asked = requests()
    first = sampler.generate(asked)
    assert bits(sampler.generate(asked)) == bits(first)
    backwards = sampler.generate(asked[::-1])
    assert [sample.sample_id for sample in backwards] == [request.sample_id for request in asked[::-1]]
    assert bits(backwards[::-1]) == bits(first)


def test_a_seed_decides_its_own_sample_alone(sampler: Any):
    asked = requests(8)
    first = sampler.generate(asked)
    other = [*asked[:3], SampleRequest(**{**vars(asked[3]), "seed": 99}), *asked[4:]]
    changed = sampler.generate(other)
    same = [a.token_ids == b.token_ids for a, b in zip(first, changed, strict=True)]
    assert same == [True, True, True, False, True, True, True, True]


def test_two_processes_give_the_same_bits(sampler: Any, second: Any, untied: Any):
    asked = requests()
    with closing(second.Sampler(untied.directory, FP32, seed=0)) as other:
        assert bits(other.generate(asked)) == bits(sampler.generate(asked))


def test_prompts_beyond_one_steps_token_budget_wait_and_are_not_cut(sampler: Any, second: Any, untied: Any):
    """vLLM on the CPU dies of a seeded request whose prompt is cut in two: "CPU Generator does not use offset"."""
    asked = requests(16)
    assert sum(len(request.prompt_ids) for request in asked) > 64
    few = FP32.model_copy(update={"engine_args": {"max_num_batched_tokens": 64}})
    with closing(second.Sampler(untied.directory, few, seed=0)) as other:
        drawn = other.generate(asked)
    assert [sample.token_ids for sample in drawn] == [sample.token_ids for sample in sampler.generate(asked)]


def test_greedy_takes_the_most_likely_token_and_reports_the_models_own_logprob(sampler: Any, untied: Any):
    model = untied.model(untied.weights(seed=0))
    asked = [
        SampleRequest(**{**vars(request), "temperature": 0.0 if request.sample_id % 2 else 0.7})
        for request in requests(16)
    ]
    for batch in (asked[1::2], asked):  # all greedy; greedy beside sampled: two branches of vLLM's sampler
        samples = sampler.generate(batch)
        assert logprob_differences(model, batch, samples).max() < FP32_LARGEST
        for request, sample in zip(batch, samples, strict=True):
            if request.temperature == 0:
                assert reference_logits(model, request, sample).argmax(-1).tolist() == list(sample.token_ids)


def test_top_p_samples_from_the_nucleus_and_reports_the_logprob_within_it(sampler: Any, untied: Any):
    model, top_p = untied.model(untied.weights(seed=0)), 0.6
    asked = requests(16, top_p=top_p, temperature=1.3)
    cut = 0
    for request, sample in zip(asked, sampler.generate(asked), strict=True):
        probs = torch.softmax(reference_logits(model, request, sample) / 1.3, -1).double().numpy()
        for row, token, logprob in zip(probs, sample.token_ids, sample.logprobs, strict=True):
            order = np.argsort(-row)
            size = int(np.searchsorted(np.cumsum(row[order]), top_p)) + 1  # the smallest set that holds top_p
            assert token in order[:size]
            assert logprob == pytest.approx(np.log(row[token] / row[order[:size]].sum()), abs=FP32_LARGEST)
            cut += 64 - size
    assert cut > 0


def test_tokens_are_drawn_with_the_models_probabilities(sampler: Any, untied: Any):
    draws = 4000
    one = requests(1)[0]
    asked = [
        SampleRequest(i, one.prompt_ids, 1, temperature=1.0, top_p=1.0, seed=sample_seed(1, 2, 3, i), stop_token_ids=())
        for i in range(draws)
    ]
    samples = sampler.generate(asked)
    logits = reference_logits(untied.model(untied.weights(seed=0)), one, samples[0])[0]
    expected = draws * torch.softmax(logits, -1).double().numpy()
    observed = np.bincount([sample.token_ids[0] for sample in samples], minlength=64)
    likely = expected >= 5
    chi2 = ((observed[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    # Mean and deviation of chi-squared with k degrees of freedom are k and sqrt(2k).
    assert likely.sum() > 10
    assert chi2 < likely.sum() + 4 * np.sqrt(2 * likely.sum())


def test_a_stop_token_ends_the_response_and_is_part_of_it(sampler: Any):
    asked = requests(16)
    full = sampler.generate(asked)
    assert {sample.finish_reason for sample in full} == {"length"}
    assert {len(sample.token_ids) for sample in full} == {24}
    assert any(2 in sample.token_ids[:-1] for sample in full)  # the model's EOS alone stops nothing
    stops = (full[0].token_ids[5], full[1].token_ids[9])
    for whole, sample in zip(full, sampler.generate(requests(16, stop_token_ids=stops)), strict=True):
        at = next((i for i, token in enumerate(whole.token_ids) if token in stops), None)
        assert sample.token_ids == whole.token_ids[: None if at is None else at + 1]
        assert sample.finish_reason == ("length" if at is None else "stop")
        assert len(sample.logprobs) == len(sample.token_ids)


def test_a_refused_request_costs_the_others_nothing(sampler: Any):
    asked = requests(4)
    first = sampler.generate(asked)
    too_long = SampleRequest(77, (3,) * 60, 24, temperature=1.0, top_p=1.0, seed=0, stop_token_ids=())
    with pytest.raises(SamplerError, match=r"sample 77: prompt of 60 tokens .* more than max_model_len 64"):
        sampler.generate([*asked, too_long])
    assert bits(sampler.generate(asked)) == bits(first)
    assert sampler.generate([]) == []


@pytest.mark.parametrize("settings", [FP32, BF16], ids=["fp32", "bf16"])
def test_parity_with_a_tied_head_sent_or_left_out(
    settings: SamplerSettings, second: Any, tied: Any, send: Send, record_property: Any
):
    dtype = getattr(torch, settings.dtype)
    asked, means, largest = requests(), [], []
    old, new = tied.weights(seed=0), tied.weights(seed=1)
    with_head = {**new, "lm_head.weight": new["model.embed_tokens.weight"]}
    with closing(second.Sampler(tied.directory, settings, seed=0)) as sampler:
        for version, (weights, sent) in enumerate([(old, None), (new, new), (old, old), (new, with_head)]):
            if sent is not None:
                sampler.update_weights(send({name: tensor.to(dtype) for name, tensor in sent.items()}, version))
            difference = logprob_differences(tied.model(weights).to(dtype), asked, sampler.generate(asked))
            means.append(float(difference.mean()))
            largest.append(float(difference.max()))
    record_property(f"{settings.dtype}_mean_logprob_difference", means)
    record_property(f"{settings.dtype}_largest_logprob_difference", largest)
    if dtype == torch.float32:
        assert max(largest) < FP32_LARGEST
    else:
        assert max(means) < BF16_MEAN


def test_a_failure_between_start_and_finish_breaks_the_engine_for_good(second: Any, untied: Any, send: Send):
    with closing(second.Sampler(untied.directory, FP32, seed=0)) as sampler:
        before = sampler.generate(requests(4))
        # int("/dev/shm/...") raises ValueError in vLLM's worker, after the session has begun.
        fault = second.patch("rlhf_core.rollout.shm_engine.load_bucket", int)
        fault.start()
        with pytest.raises(EngineBroken, match="the update to version 3 failed half-way: ValueError"):
            sampler.update_weights(send(untied.weights(seed=1), 3))
        fault.stop()
        for call in (
            lambda: sampler.generate(requests(4)),
            lambda: sampler.update_weights(send(untied.weights(seed=1), 4)),
            sampler.check,
        ):
            with pytest.raises(EngineBroken, match=r"version 3 failed.*start another and send it the current weights"):
                call()
    with pytest.raises(EngineBroken):
        sampler.check()
    with closing(second.Sampler(untied.directory, FP32, seed=0)) as replacement:
        assert bits(replacement.generate(requests(4))) == bits(before)


def test_a_closed_sampler_says_so(second: Any, untied: Any):
    sampler = second.Sampler(untied.directory, FP32, seed=0)
    sampler.check()
    sampler.close()
    sampler.close()
    with pytest.raises(SamplerError, match="closed; make a new one"):
        sampler.generate(requests(1))


def test_an_unknown_engine_argument_stops_the_start(second: Any, untied: Any):
    settings = FP32.model_copy(update={"engine_args": {"max_num_batched_token": 64}})
    # A manager hands on what a constructor raises as text.
    with pytest.raises(
        RemoteError, match=r"SamplerError: engine_args\.max_num_batched_token .*did you mean max_num_batched_tokens"
    ):
        second.Sampler(untied.directory, settings, seed=0)
