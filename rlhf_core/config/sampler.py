"""Settings of the sampler: one vLLM engine."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.config.base import Neutral, Settings


class SamplerSettings(Settings):
    """How a vLLM engine is set up. What it samples is in each request."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="Type of weights and KV cache."
    )
    max_model_len: int = Field(default=2048, gt=1, description="Longest prompt and response together, tokens.")
    max_num_seqs: int = Field(default=64, gt=0, description="Sequences an engine decodes at a time; the others wait.")
    enable_prefix_caching: bool = Field(
        default=True, description="Samples of one prompt share its KV cache within a call."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's EngineArgs, by name; checked at engine start."
    )
    gpu_memory_utilization: Annotated[float, Neutral] = Field(
        default=0.9, gt=0, le=1, description="Share of a GPU's memory that the engine takes; not used on the CPU."
    )
    kv_cache_gib: Annotated[float, Neutral] = Field(
        default=1.0, gt=0, description="KV cache on the CPU, GiB; on a GPU gpu_memory_utilization decides."
    )
    tensor_parallel_size: Annotated[int, Neutral] = Field(
        default=1, gt=0, description="GPUs an engine is split over; 1 on the CPU."
    )
    enforce_eager: Annotated[bool, Neutral] = Field(
        default=False, description="No CUDA graphs, no compilation; always so on the CPU."
    )
