"""The calls that are made of vLLM, bound to the installed library's signatures; for the GPU backends, this alone."""

import dataclasses
import inspect
from importlib.metadata import entry_points
from typing import Any

import pytest

from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.rollout import weight_transfer
from rlhf_core.rollout.sampler import engine_arguments

pytestmark = pytest.mark.engines


def binds(function: Any, *arguments: Any, **named: Any) -> None:
    """Raises TypeError unless `function`, unbound, takes these arguments after self."""
    inspect.signature(function).bind(None, *arguments, **named)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_engine_args_has_every_name_that_is_given_to_it(on_cpu: bool):
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    given = engine_arguments("/models/m", SamplerSettings(), seed=0, on_cpu=on_cpu, known=known)
    assert set(given) <= set(known)


def test_the_engine_takes_the_calls_of_the_sampler():
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

    binds(LLMEngine.from_engine_args.__func__, object())
    binds(LLMEngine.add_request, "0", {"prompt_token_ids": [1]}, object())
    binds(LLMEngine.step)
    binds(LLMEngine.has_unfinished_requests)
    binds(LLMEngine.reset_prefix_cache)
    binds(LLMEngine.collective_rpc, "update_weights", kwargs={"update_info": {"path": "x"}})
    binds(Worker.init_weight_transfer_engine, init_info={})
    binds(Worker.start_weight_update)
    binds(Worker.update_weights, update_info={"path": "x"})
    binds(Worker.finish_weight_update)
    names = ["temperature", "top_p", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "logprobs", "flat_logprobs"]
    inspect.signature(SamplingParams).bind(**dict.fromkeys([*names, "detokenize", "output_kind"]))
    assert RequestOutputKind.FINAL_ONLY in RequestOutputKind


def test_our_engine_fills_vllms_interface_and_is_found_by_the_entry_point():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rlhf_core.rollout.shm_engine import SharedMemoryUpdateInfo, SharedMemoryWeightTransferEngine

    (entry,) = entry_points(group="vllm.general_plugins", name="rlhf_weight_transfer")
    assert entry.load() is weight_transfer.register
    weight_transfer.register()
    weight_transfer.register()
    assert WeightTransferEngineFactory._registry[weight_transfer.BACKEND]() is SharedMemoryWeightTransferEngine
    assert not SharedMemoryWeightTransferEngine.__abstractmethods__
    for name in WeightTransferEngine.__abstractmethods__:
        theirs, ours = getattr(WeightTransferEngine, name), getattr(SharedMemoryWeightTransferEngine, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    binds(WeightTransferEngine.__init__, object(), object(), object(), object())
    assert SharedMemoryUpdateInfo(path="x").path == "x"


@pytest.mark.parametrize(
    ("module", "prefix", "trainer_init"),
    [
        ("nccl_engine", "NCCL", {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "rank": 0}),
        ("ipc_engine", "IPC", {"rank": 0}),
    ],
)
def test_the_gpu_backends_have_the_methods_of_a_session(module: str, prefix: str, trainer_init: dict[str, Any]):
    import importlib

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    found = importlib.import_module(f"vllm.distributed.weight_transfer.{module}")
    worker = getattr(found, f"{prefix}WeightTransferEngine")
    trainer = getattr(found, f"{prefix}TrainerWeightTransferEngine")
    info = getattr(found, f"{prefix}TrainerInitInfo")(**trainer_init)
    assert WeightTransferEngineFactory._registry[info.backend]() is worker
    assert WeightTransferTrainerFactory._registry[info.backend]() is trainer
    binds(worker.init_transfer_engine, object())
    binds(worker.start_weight_update)
    binds(worker.receive_weights, object())
    binds(worker.finish_weight_update)
    binds(worker.shutdown)
    binds(trainer.trainer_init.__func__, info, client=object(), source=object())
    binds(trainer.send_weights)
    binds(trainer.shutdown)
