"""What a sampler refuses before vLLM is imported."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.rollout.environment import sampler_environment
from rlhf_core.rollout.sampler import (
    Sampler,
    SampleRequest,
    SamplerError,
    check_requests,
    engine_arguments,
)

REQUEST = SampleRequest(41, (1, 5, 63), 8, 1.0, 1.0, 3, (2,))
KNOWN = ["max_num_batched_tokens", "swap_space", "model", "seed"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": (1,) * 25}, "prompt of 25 tokens and max_new_tokens 8 are more than max_model_len 32"),
        ({"prompt_ids": (1,) * 40}, "prompt of 40 tokens"),
        ({"prompt_ids": ()}, "the prompt is empty"),
        ({"prompt_ids": (1, 64)}, "prompt ids go from 1 to 64, the model has 0 to 63"),
        ({"prompt_ids": (-1, 3)}, "prompt ids go from -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": 0.001}, "temperature 0.001; give 0 .greedy. or 0.01 and more"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_a_request_that_cannot_be_served_is_named(change: dict[str, Any], message: str):
    good = dataclasses.replace(REQUEST, sample_id=40)
    with pytest.raises(SamplerError, match=f"sample 41: {message}"):
        check_requests([good, dataclasses.replace(REQUEST, **change)], max_model_len=32, vocab_size=64)


def test_limits_themselves_are_allowed():
    requests = [
        dataclasses.replace(REQUEST, sample_id=0, prompt_ids=(0,) * 24, seed=2**63 - 1),
        dataclasses.replace(REQUEST, sample_id=1, temperature=0.0, top_p=1.0, seed=0),
        dataclasses.replace(REQUEST, sample_id=2, temperature=0.01),
    ]
    check_requests(requests, max_model_len=32, vocab_size=64)


def test_a_sample_id_twice_is_refused():
    with pytest.raises(SamplerError, match="sample 41 is asked for twice"):
        check_requests([REQUEST, REQUEST], max_model_len=32, vocab_size=64)


def arguments(settings: SamplerSettings, *, on_cpu: bool = True) -> dict[str, Any]:
    return engine_arguments("/models/m", settings, seed=5, on_cpu=on_cpu, known=KNOWN)


def test_an_unknown_engine_argument_is_answered_with_the_nearest_name():
    settings = SamplerSettings(engine_args={"max_num_batched_token": 512})
    with pytest.raises(
        SamplerError, match=r"engine_args\.max_num_batched_token .*did you mean max_num_batched_tokens\?"
    ):
        arguments(settings)


def test_an_engine_argument_that_a_setting_decides_is_refused():
    with pytest.raises(SamplerError, match=r"engine_args\.seed is decided by the sampler \(5\)"):
        arguments(SamplerSettings(engine_args={"seed": 1}))


def test_a_known_engine_argument_is_passed_on():
    assert arguments(SamplerSettings(engine_args={"swap_space": 2}))["swap_space"] == 2


def test_the_device_decides_executor_memory_and_eager_mode():
    settings = SamplerSettings(kv_cache_gib=0.25, gpu_memory_utilization=0.6)
    cpu, gpu = arguments(settings), arguments(settings, on_cpu=False)
    assert (cpu["distributed_executor_backend"], cpu["enforce_eager"]) == ("uni", True)
    assert cpu["kv_cache_memory_bytes"] == 268_435_456
    assert "gpu_memory_utilization" not in cpu
    assert gpu["enforce_eager"] is False
    assert gpu["gpu_memory_utilization"] == 0.6
    assert not {"distributed_executor_backend", "kv_cache_memory_bytes"} & gpu.keys()


def test_tensor_parallelism_on_the_cpu_is_refused():
    with pytest.raises(SamplerError, match="tensor_parallel_size is 2; on the CPU an engine has 1"):
        arguments(SamplerSettings(tensor_parallel_size=2))
    assert arguments(SamplerSettings(tensor_parallel_size=2), on_cpu=False)["tensor_parallel_size"] == 2


def test_a_misspelt_setting_is_refused():
    with pytest.raises(ValidationError, match="max_model_length"):
        SamplerSettings.model_validate({"max_model_length": 32})


def test_the_environment_fixes_threads_and_keeps_the_engine_in_its_owners_process():
    environment = sampler_environment(threads=2)
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert all(isinstance(value, str) for value in environment.values())
    with pytest.raises(ValueError, match="threads is 0"):
        sampler_environment(threads=0)


@pytest.mark.parametrize("absent", ["VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"])
def test_a_process_without_that_environment_is_refused(absent: str, untied: Any, monkeypatch: pytest.MonkeyPatch):
    for name, value in sampler_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(absent)
    with pytest.raises(SamplerError, match=r"sampler_environment\(\)"):
        Sampler(untied.directory, SamplerSettings(), seed=0)


def test_a_model_directory_without_weights_is_named(tmp_path: Path, untied: Any, monkeypatch: pytest.MonkeyPatch):
    for name, value in sampler_environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text((untied.directory / "config.json").read_text())
    loaded = "vllm" in sys.modules
    with pytest.raises(SamplerError, match=f"{tmp_path} holds no weights"):
        Sampler(tmp_path, SamplerSettings(), seed=0)
    assert ("vllm" in sys.modules) == loaded
