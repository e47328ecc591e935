"""Settings that every trained stage shares: model source, optimizer, DeepSpeed and Ray placement, checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings

Dtype = Literal["float32", "bfloat16", "float16"]


class ScratchModel(Settings):
    """A small Llama made from scratch, with its own character tokenizer (rlhf_core/models/scratch.py)."""

    hidden_size: int = Field(gt=0, multiple_of=8, description="Width of the residual stream.")
    layers: int = Field(gt=0, description="Transformer blocks.")
    heads: int = Field(gt=0, description="Attention heads.")
    kv_heads: int = Field(gt=0, description="Key and value heads (grouped-query attention).")
    intermediate_size: int = Field(gt=0, description="Width of the feed-forward layer.")
    max_position: int = Field(default=256, gt=0, description="Longest sequence, tokens.")
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights.")

    @model_validator(mode="after")
    def _shapes(self) -> "ScratchModel":
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of 2 x heads {self.heads} (rotary embeddings want "
                f"an even head size), and heads a multiple of kv_heads {self.kv_heads}"
            )
        return self


class ModelSource(Settings):
    """The model a chain starts from: a Hugging Face directory, a model of the hub, or a small Llama from scratch."""

    path: Annotated[str | None, Neutral] = Field(
        default=None, description="Hugging Face model directory; its content is in the key."
    )
    hub: Annotated[str | None, Neutral] = Field(
        default=None, description="Model on the Hugging Face hub, e.g. org/name; its commit is in the key."
    )
    revision: Annotated[str | None, Neutral] = Field(
        default=None, description="Branch, tag or commit on the hub; null: its main branch."
    )
    scratch: ScratchModel | None = Field(default=None, description="Make a small Llama instead.")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSource":
        if sum(given is not None for given in (self.path, self.hub, self.scratch)) != 1:
            raise ValueError("give exactly one of `path`, `hub` and `scratch`")
        if self.revision is not None and self.hub is None:
            raise ValueError("`revision` belongs to `hub`")
        return self


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021) on frozen weights, through peft."""

    rank: int = Field(gt=0, description="Rank of each adapter.")
    alpha: float = Field(default=16.0, gt=0, description="Adapters are scaled by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before each adapter.")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear", description="Names of the modules that get one; all-linear leaves out the output head."
    )
    load_in_4bit: bool = Field(default=False, description="QLoRA: frozen weights as NF4 (bitsandbytes, CUDA).")


class OptimizerSettings(Settings):
    """AdamW, or Muon for the matrices and AdamW for the rest, with a warm-up and a decay."""

    name: Literal["adamw", "muon"] = Field(default="adamw", description="Muon updates the hidden layers' matrices.")
    lr: float = Field(gt=0, description="AdamW's peak learning rate.")
    muon_lr: float = Field(default=0.02, gt=0, description="Muon's peak learning rate.")
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon's momentum.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="Adam's decay rates.")
    eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled weight decay; not applied to biases and norms."
    )
    schedule: Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt"] = Field(
        default="cosine", description="Decay after the warm-up; wsd stays at the peak and falls at the end."
    )
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1, description="Share of the steps that warm up.")
    decay_ratio: float = Field(
        default=0.2, gt=0, le=1, description="Share of the steps, the last ones, over which wsd falls."
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="Floor of the decay, as a share of lr.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient norm is clipped to this (AdamW).")

    @model_validator(mode="after")
    def _phases(self) -> "OptimizerSettings":
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"warmup_ratio {self.warmup_ratio:g} and decay_ratio {self.decay_ratio:g} are more than all steps; "
                f"lower one of them"
            )
        return self


class TrainerSettings(Settings):
    """How the trainer's ranks are laid out and what they save; only grad_accum_dtype changes what is trained."""

    ranks: Annotated[int, Neutral] = Field(
        default=1, gt=0, description="Processes, one accelerator each; tensor- and sequence-parallel ones counted."
    )
    zero_stage: Annotated[Literal[0, 1, 2, 3], Neutral] = Field(
        default=2, description="DeepSpeed ZeRO stage; for 0, bfloat16 and ranks that share samples train with 1."
    )
    offload_optimizer: Annotated[bool, Neutral] = Field(default=False, description="Optimizer states in host memory.")
    micro_batch_size: Annotated[int, Neutral] = Field(
        default=8, gt=0, description="Samples a rank puts through at once."
    )
    activation_checkpointing: Annotated[bool, Neutral] = Field(default=False, description="Recompute activations.")
    attention: Annotated[Literal["sdpa", "eager", "flash_attention_2"], Neutral] = Field(
        default="sdpa", description="Attention kernel."
    )
    activation_checkpointing_reentrant: Annotated[bool, Neutral] = Field(
        default=False, description="PyTorch's older, re-entrant variant of it."
    )
    packing: Annotated[bool, Neutral] = Field(
        default=False, description="Fill rows with several samples, isolated from one another, instead of padding."
    )
    tensor_parallel: Annotated[int, Neutral] = Field(
        default=1, gt=0, description="Ranks that share each layer (DeepSpeed AutoTP)."
    )
    sequence_parallel: Annotated[int, Neutral] = Field(
        default=1, gt=0, description="Ranks that share each sequence (DeepSpeed Ulysses)."
    )
    overlap_comm: Annotated[bool, Neutral] = Field(default=False, description="Reduce gradients during the backward.")
    grad_accum_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Dtype in which gradients add up; null: float32."
    )
    zpg: Annotated[int, Neutral] = Field(
        default=1, gt=0, description="ZeRO++ hierarchical partition: ranks of a node that share a second copy (ZeRO-3)."
    )
    experts_implementation: Annotated[Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None, Neutral] = Field(
        default=None, description="Kernel of a mixture of experts; null: transformers decides."
    )
    liger: Annotated[bool, Neutral] = Field(default=False, description="Liger kernels (CUDA).")
    deepcompile: Annotated[bool, Neutral] = Field(default=False, description="DeepSpeed DeepCompile (CUDA).")
    deterministic: Annotated[bool, Neutral] = Field(
        default=False, description="Kernels that give the same bits each time; slower, and some operations have none."
    )
    save_hf: Annotated[bool, Neutral] = Field(
        default=False, description="A Hugging Face export with each training checkpoint."
    )
    save_steps: Annotated[int | None, Neutral] = Field(
        default=50, gt=0, description="Steps between training checkpoints; null: none are made, and none to go on from."
    )
    keep_checkpoints: Annotated[int, Neutral] = Field(
        default=2, gt=0, description="Complete training checkpoints kept."
    )
    keep_checkpoints_gib: Annotated[float | None, Neutral] = Field(
        default=None,
        gt=0,
        description="Older ones of them go while all are larger together, in GiB; never the newest and the best.",
    )
    step_timeout_s: Annotated[float, Neutral] = Field(
        default=600.0,
        gt=0,
        description="A step that takes longer than this is a hung rank: the stage fails and says which.",
    )

    def saves_at(self, step: int, total: int) -> bool:
        """Whether a training checkpoint is made after step `step` of `total`."""
        return self.save_steps is not None and (step == total or step % self.save_steps == 0)
