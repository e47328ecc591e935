"""The sampler: one vLLM engine, stepped by its owner, that draws responses and takes new weights.

Exactness: a call's requests are all added, in order of sample id, before the first step; the prefix cache is emptied
before; threads are fixed by `sampler_environment`. Then the same call on the same weights gives the same bits, in this
process or another one (docs/rollout-engine.md has the measurement). One call at a time: a Sampler is not thread-safe.
"""

import dataclasses
import difflib
import gc
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.rollout.sample import Sample, SampleRequest, sample_seed
from rlhf_core.rollout.weight_transfer import (
    BACKEND,
    WeightTransferError,
    read_index,
    read_model_spec,
    read_transfer,
)

__all__ = [
    "EngineBroken",
    "Sample",
    "SampleRequest",
    "Sampler",
    "SamplerError",
    "WeightReport",
    "check_requests",
    "engine_arguments",
    "sample_seed",
]

# vLLM raises a smaller temperature to this one and only logs it.
MIN_TEMPERATURE = 0.01


class SamplerError(Exception):
    """A setting or a request that the sampler cannot use. The engine is as it was."""


class EngineBroken(Exception):
    """Nobody knows what the engine would sample now: end it, start another and send it the current weights."""


@dataclass(frozen=True)
class WeightReport:
    """An update that was taken. checksum: the index's; bytes: received; seconds: with the check of every byte."""

    version: int
    checksum: str
    seconds: float
    bytes: int


class Sampler:
    """Draws responses from a model directory's weights, until others are sent. Version 0 are the directory's own.

    seed: of the engine; samples depend on their requests' seeds alone.
    Raises SamplerError for a directory without weights or an argument that vLLM does not know, before vLLM starts.
    """

    def __init__(self, model_dir: str | os.PathLike[str], settings: SamplerSettings, *, seed: int) -> None:
        _check_environment(os.environ)
        try:
            self._spec = read_model_spec(model_dir, getattr(torch, settings.dtype))
        except WeightTransferError as error:
            raise SamplerError(str(error)) from error
        self._settings = settings
        self._version = 0
        self._broken: str | None = None
        self._engine: Any = _start_engine(model_dir, settings, seed)
        self._vocab_size: int = self._engine.model_config.get_vocab_size()

    @property
    def version(self) -> int:
        """Version of the weights that the next call samples from."""
        return self._version

    def check(self) -> None:
        """Raises EngineBroken if the engine cannot be used any more, SamplerError if it was closed."""
        if self._broken is not None:
            raise EngineBroken(f"{self._broken}; end this engine, start another and send it the current weights")
        if self._engine is None:
            raise SamplerError("the sampler was closed; make a new one")
        self._engine.model_executor.check_health()

    def generate(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """One response a request, in the order of `requests`.

        Raises SamplerError before the first step if a request cannot be served, EngineBroken if the engine fails.
        """
        self.check()
        check_requests(requests, max_model_len=self._settings.max_model_len, vocab_size=self._vocab_size)
        version = self._version
        outputs: dict[int, Any] = {}
        with self._breaks_engine("sampling failed"):
            self._empty_prefix_cache()
            for request in sorted(requests, key=lambda request: request.sample_id):
                prompt = {"prompt_token_ids": list(request.prompt_ids)}
                self._engine.add_request(str(request.sample_id), prompt, _sampling_params(request))
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        outputs[int(output.request_id)] = output.outputs[0]
            return [_sample(request.sample_id, outputs[request.sample_id], version) for request in requests]

    def update_weights(self, index_path: str | os.PathLike[str]) -> WeightReport:
        """Takes the weights of a transfer (see weight_transfer.py) and empties the prefix cache.

        Raises WeightTransferError if the transfer is not whole or does not fit: weights and version stay. Raises
        EngineBroken if vLLM fails on the way: its layers are then half loaded.
        """
        self.check()
        started = time.perf_counter()
        index = read_index(index_path)
        transfer = read_transfer(index, self._spec)
        with self._breaks_engine(f"the update to version {index.version} failed half-way"):
            self._engine.collective_rpc("start_weight_update")
            for bucket in index.buckets:
                update = {"path": str(index.path.parent / bucket.file)}
                self._engine.collective_rpc("update_weights", kwargs={"update_info": update})
            self._engine.collective_rpc("finish_weight_update")
            self._empty_prefix_cache()
        self._version = index.version
        return WeightReport(index.version, index.checksum, time.perf_counter() - started, transfer.received)

    def close(self) -> None:
        """Ends the engine and what it started. May be called twice."""
        if self._engine is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _empty_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: a request still holds blocks of it")

    @contextmanager
    def _breaks_engine(self, what: str) -> Iterator[None]:
        """Whatever ends the block early, an interrupt too, leaves the engine in a state that nobody knows."""
        self._broken = what
        try:
            yield
        except Exception as error:
            self._broken = f"{what}: {type(error).__name__}: {error}"
            raise EngineBroken(self._broken) from error
        self._broken = None


def check_requests(requests: Sequence[SampleRequest], *, max_model_len: int, vocab_size: int) -> None:
    """Raises SamplerError that names the first request which the engine cannot serve as it stands."""
    seen: set[int] = set()
    for request in requests:
        where = f"sample {request.sample_id}"
        length = len(request.prompt_ids)
        if request.sample_id in seen:
            raise SamplerError(f"{where} is asked for twice in a call; give each request a sample_id of its own")
        seen.add(request.sample_id)
        if length == 0:
            raise SamplerError(f"{where}: the prompt is empty; give at least one token, such as BOS")
        if request.max_new_tokens < 1:
            raise SamplerError(f"{where}: max_new_tokens is {request.max_new_tokens}; give 1 or more")
        if length + request.max_new_tokens > max_model_len:
            raise SamplerError(
                f"{where}: prompt of {length} tokens and max_new_tokens {request.max_new_tokens} are more than "
                f"max_model_len {max_model_len}; shorten one of them or raise max_model_len"
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            raise SamplerError(
                f"{where}: prompt ids go from {min(request.prompt_ids)} to {max(request.prompt_ids)}, the model has "
                f"0 to {vocab_size - 1}; was another tokenizer used?"
            )
        if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < float("inf"):
            raise SamplerError(
                f"{where}: temperature {request.temperature}; give 0 (greedy) or {MIN_TEMPERATURE} and more"
            )
        if not 0 < request.top_p <= 1:
            raise SamplerError(f"{where}: top_p {request.top_p}; give more than 0 and at most 1")
        if not 0 <= request.seed < 2**63:
            raise SamplerError(f"{where}: seed {request.seed}; give 0 to 2**63 - 1 (sample_seed does)")


def engine_arguments(
    model_dir: str | os.PathLike[str], settings: SamplerSettings, *, seed: int, on_cpu: bool, known: Collection[str]
) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs. `known`: the names that EngineArgs has.

    Raises SamplerError if `settings.engine_args` has a name that is not known or that another setting decides.
    """
    if on_cpu and settings.tensor_parallel_size != 1:
        raise SamplerError(f"tensor_parallel_size is {settings.tensor_parallel_size}; on the CPU an engine has 1")
    ours: dict[str, Any] = {
        "model": str(Path(model_dir)),
        "seed": seed,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager or on_cpu,
        "enable_prefix_caching": settings.enable_prefix_caching,
        # Log-probs after temperature and top_p: those of the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        # Requests bring tokens and sampling parameters: nothing comes from the model's tokenizer or generation config.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        ours |= {
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
            # A prompt cut in two takes a seeded request's generator back by a step, which the CPU's cannot do.
            "enable_chunked_prefill": False,
        }
    else:
        ours |= {"gpu_memory_utilization": settings.gpu_memory_utilization}
    for name in settings.engine_args:
        if name in ours:
            raise SamplerError(
                f"engine_args.{name} is decided by the sampler ({ours[name]!r}); take it out of engine_args"
            )
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else "; `vllm serve --help` lists the names"
            raise SamplerError(f"engine_args.{name} is no argument of vLLM{hint}")
    return {**ours, **settings.engine_args}


def _check_environment(environment: Mapping[str, str]) -> None:
    """Without these vLLM would start a process of its own for the engine, or as many threads as there are cores."""
    if environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0" or not environment.get("OMP_NUM_THREADS"):
        raise SamplerError(
            "VLLM_ENABLE_V1_MULTIPROCESSING must be 0 and OMP_NUM_THREADS be set; start the sampler's process with "
            "the variables of sampler_environment()"
        )


def _start_engine(model_dir: str | os.PathLike[str], settings: SamplerSettings, seed: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_arguments(
        model_dir,
        settings,
        seed=seed,
        on_cpu=current_platform.is_cpu(),
        known=[field.name for field in dataclasses.fields(EngineArgs)],
    )
    # vLLM lets this variable, in whole GiB, win over kv_cache_memory_bytes.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    return engine


def _sampling_params(request: SampleRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        max_tokens=request.max_new_tokens,
        # The model's own EOS does not count: the request says what stops it.
        ignore_eos=True,
        stop_token_ids=list(request.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sample(sample_id: int, completion: Any, version: int) -> Sample:
    """logprobs=0 gives one entry a position, the sampled token's."""
    logprobs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
    if len(logprobs) != len(completion.token_ids) or completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"sample {sample_id}: vLLM gave {len(completion.token_ids)} tokens, {len(logprobs)} log-probs and "
            f"finish_reason {completion.finish_reason}"
        )
    return Sample(sample_id, tuple(completion.token_ids), logprobs, completion.finish_reason, version)
