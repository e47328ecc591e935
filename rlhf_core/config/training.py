"""Settings that every trained stage shares: model source, optimizer, DeepSpeed and Ray placement, checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings

Dtype = Literal["float32", "bfloat16"]


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
    """The model a chain starts from: a Hugging Face directory, or a small Llama from scratch."""

    path: Annotated[str | None, Neutral] = Field(
        default=None, description="Hugging Face model directory; its content is in the key."
    )
    scratch: ScratchModel | None = Field(default=None, description="Make a small Llama instead.")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSource":
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give exactly one of `path` and `scratch`")
        return self


class OptimizerSettings(Settings):
    """AdamW with a warm-up and a decay."""

    lr: float = Field(gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="Adam's decay rates.")
    eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled weight decay; not applied to biases and norms."
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(default="cosine", description="Decay after the warm-up.")
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1, description="Share of the steps that warm up.")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="Floor of the decay, as a share of lr.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Global gradient norm is clipped to this.")


class TrainerSettings(Settings):
    """How the trainer's ranks are laid out and what they save; none of it changes what is trained."""

    ranks: Annotated[int, Neutral] = Field(default=1, gt=0, description="Data-parallel ranks, one accelerator each.")
    zero_stage: Annotated[Literal[0, 1, 2, 3], Neutral] = Field(
        default=2, description="DeepSpeed ZeRO stage; bfloat16 trains with 1 where 0 is given."
    )
    offload_optimizer: Annotated[bool, Neutral] = Field(default=False, description="Optimizer states in host memory.")
    micro_batch_size: Annotated[int, Neutral] = Field(
        default=8, gt=0, description="Samples a rank puts through at once."
    )
    activation_checkpointing: Annotated[bool, Neutral] = Field(default=False, description="Recompute activations.")
    attention: Annotated[Literal["sdpa", "eager", "flash_attention_2"], Neutral] = Field(
        default="sdpa", description="Attention kernel."
    )
    save_steps: Annotated[int, Neutral] = Field(default=50, gt=0, description="Steps between training checkpoints.")
    keep_checkpoints: Annotated[int, Neutral] = Field(
        default=2, gt=0, description="Complete training checkpoints kept."
    )
    step_timeout_s: Annotated[float, Neutral] = Field(
        default=600.0,
        gt=0,
        description="A step that takes longer than this is a hung rank: the stage fails and says which.",
    )


class SupervisedSettings(Settings):
    """What SFT and RM share. `epochs` or `max_steps` says when to stop."""

    optimizer: OptimizerSettings = Field(description="Learning rate and schedule.")
    batch_size: int = Field(gt=0, description="Samples (or pairs) an optimizer step sees, over all ranks.")
    max_len: int = Field(gt=0, description="Longest sequence, tokens.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the data.")
    max_steps: int | None = Field(default=None, gt=0, description="Optimizer steps.")
    seed: int = Field(default=0, ge=0, description="Order of the data, new weights, dropout.")
    dtype: Dtype = Field(default="bfloat16", description="Weights' dtype; bfloat16 trains with fp32 master weights.")
    eval_steps: int | None = Field(
        default=None, gt=0, description="Steps between evaluations on held-out rows; the last always."
    )
    trainer: TrainerSettings = Field(default_factory=TrainerSettings, description="Ranks, ZeRO, saving.")

    @model_validator(mode="after")
    def _batch_equations(self) -> "SupervisedSettings":
        if (self.epochs is None) == (self.max_steps is None):
            raise ValueError("give exactly one of `epochs` and `max_steps`")
        check_batch(self.batch_size, self.trainer.ranks)
        return self


class SftSettings(SupervisedSettings):
    model: ModelSource = Field(description="The base model.")

    @model_validator(mode="after")
    def _length(self) -> "SftSettings":
        scratch = self.model.scratch
        if scratch is not None and self.max_len > scratch.max_position:
            raise ValueError(
                f"max_len {self.max_len} is above model.scratch.max_position {scratch.max_position}; lower it or give "
                f"the model more positions"
            )
        return self


class RmSettings(SupervisedSettings):
    """A scalar head on the SFT model, trained with the pairwise sigmoid loss."""


def check_batch(batch_size: int, ranks: int, name: str = "batch_size") -> None:
    """Every rank gets the same number of samples of each optimizer step, or the settings are refused."""
    if batch_size % ranks:
        near = max(ranks, batch_size // ranks * ranks)
        raise ValueError(f"{name} {batch_size} is not a multiple of trainer.ranks {ranks}; e.g. {near} is")
