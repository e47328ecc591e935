"""Settings of the supervised stages: SFT, reward model, process reward model, DPO, KTO."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings
from rlhf_core.config.training import Dtype, LoraSettings, ModelSource, OptimizerSettings, TrainerSettings


class TextSettings(Settings):
    """How rows become tokens, and which tokens are trained on."""

    format: Literal["chat", "template", "text"] = Field(
        default="chat",
        description="chat: the tokenizer's chat template; template: input_template; text: plain text, every token "
        "trained on (continued pre-training).",
    )
    input_template: str = Field(
        default="User: {}\nAssistant: ", description="What stands before a response in the format `template`."
    )
    chat_template: Annotated[str | None, Neutral] = Field(
        default=None, description="Jinja file that replaces the tokenizer's chat template; its content is in the key."
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="Which of a conversation's assistant turns are trained on."
    )
    truncation: Literal["drop", "cut", "split"] = Field(
        default="drop",
        description="Rows longer than max_len: left out, or their end cut off, and counted; format text: or split into "
        "chunks, of which the last has the end token.",
    )
    on_bad_row: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="A row that cannot be tokenised, e.g. one that the chat template refuses: the stage fails with its "
        "number, or it is left out and counted.",
    )

    @model_validator(mode="after")
    def _splits_text(self) -> "TextSettings":
        if self.truncation == "split" and self.format != "text":
            raise ValueError(f"truncation split goes with format text; with format {self.format} give drop or cut")
        return self

    @model_validator(mode="after")
    def _one_gap(self) -> "TextSettings":
        if self.input_template.count("{}") != 1:
            raise ValueError(f"input_template {self.input_template!r} must hold {{}} once, where the prompt goes")
        return self


class SupervisedSettings(Settings):
    """What all of them share. `epochs` or `max_steps` says when to stop."""

    metrics: ClassVar[tuple[str, ...]]  # of an evaluation, by which the best one can be chosen

    model: ModelSource | None = Field(
        default=None, description="The model to start from; null: the SFT stage's (which must have one of its own)."
    )
    lora: LoraSettings | None = Field(default=None, description="Train adapters instead of all weights.")
    freeze: tuple[str, ...] = Field(
        default=(), description="Regular expressions; parameters whose name one of them finds stay as they are."
    )
    text: TextSettings = Field(default_factory=TextSettings, description="From rows to tokens.")
    optimizer: OptimizerSettings = Field(description="Learning rate and schedule.")
    batch_size: int = Field(gt=0, description="Samples (or pairs) an optimizer step sees, over all ranks.")
    max_len: int = Field(gt=0, description="Longest sequence, tokens.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the data.")
    max_steps: int | None = Field(default=None, gt=0, description="Optimizer steps.")
    seed: int = Field(default=0, ge=0, description="Order of the data, new weights, dropout.")
    dtype: Dtype = Field(default="bfloat16", description="Weights' dtype; bfloat16 trains with fp32 master weights.")
    aux_loss_coef: float = Field(default=0.0, ge=0, description="Weight of a mixture of experts' load-balancing loss.")
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="Export the moving average of the weights (kept in fp32) with this decay."
    )
    eval_steps: int | None = Field(
        default=None, gt=0, description="Steps between evaluations on held-out rows; the last always."
    )
    best_metric: str | None = Field(
        default=None,
        description="Export the weights of the evaluation with the best value of this metric, e.g. loss, accuracy.",
    )
    best_is: Literal["lower", "higher"] | None = Field(
        default=None, description="Which value of best_metric is better; null: lower of loss and kl, higher of others."
    )
    trainer: TrainerSettings = Field(default_factory=TrainerSettings, description="Ranks, ZeRO, saving.")

    @model_validator(mode="after")
    def _stops(self) -> "SupervisedSettings":
        if (self.epochs is None) == (self.max_steps is None):
            raise ValueError("give exactly one of `epochs` and `max_steps`")
        if self.best_metric is not None and self.best_metric not in self.metrics:
            raise ValueError(f"best_metric {self.best_metric!r} is none of {', '.join(self.metrics)}")
        if self.best_is is not None and self.best_metric is None:
            raise ValueError(f"best_is {self.best_is} says which value of best_metric is better; give best_metric too")
        if self.best_metric is not None and self.trainer.save_steps is None:
            raise ValueError(
                f"best_metric {self.best_metric} keeps the best weights in a training checkpoint, and "
                f"trainer.save_steps is null; give it a number, or leave best_metric out"
            )
        scratch = self.model.scratch if self.model is not None else None
        if scratch is not None and self.max_len > scratch.max_position:
            raise ValueError(
                f"max_len {self.max_len} is above model.scratch.max_position {scratch.max_position}; lower it or give "
                f"the model more positions"
            )
        return self

    @model_validator(mode="after")
    def _adapters(self) -> "SupervisedSettings":
        if self.lora is not None and self.trainer.tensor_parallel > 1:
            raise ValueError(
                f"lora with trainer.tensor_parallel {self.trainer.tensor_parallel}: DeepSpeed would divide adapters as "
                f"well; use trainer.zero_stage 3, which divides all weights"
            )
        return self

    @property
    def better(self) -> Literal["lower", "higher"]:
        """Which value of best_metric is better."""
        return self.best_is or ("lower" if self.best_metric in ("loss", "kl", None) else "higher")


class SftSettings(SupervisedSettings):
    """Supervised fine-tuning, or continued pre-training with text.format `text`."""

    metrics = ("loss",)

    model: ModelSource = Field(description="The base model.")  # pyright: ignore[reportIncompatibleVariableOverride]


OnPolicy = Literal["data", "on_policy"]


class RmSettings(SupervisedSettings):
    """A scalar head on the model, trained on preference pairs."""

    metrics = ("loss", "accuracy", "margin")

    pairs: Annotated[OnPolicy, Neutral] = Field(
        default="data", description="data: data.pairs; on_policy: what the stage sample makes, with form pairs."
    )
    loss: Literal["sigmoid", "log_exp"] = Field(
        default="sigmoid", description="Bradley-Terry, with the margin where used; or log(1 + exp(-difference))."
    )
    use_margin: bool = Field(default=False, description="Subtract each row's `margin` inside the sigmoid.")
    centering_coef: float = Field(
        default=0.0, ge=0, description="Weight of (chosen + rejected)^2, which keeps scores around 0."
    )

    @model_validator(mode="after")
    def _margin(self) -> "RmSettings":
        if self.use_margin and self.loss != "sigmoid":
            raise ValueError(f"use_margin goes with loss sigmoid; loss {self.loss} has no margin")
        return self


class PrmSettings(SupervisedSettings):
    """A process reward model: a causal model that judges each step at a placeholder token behind it."""

    metrics = ("loss", "accuracy")

    steps: Annotated[OnPolicy, Neutral] = Field(
        default="data", description="data: data.steps; on_policy: what the stage sample makes, with form steps."
    )
    placeholder_token: str = Field(description="A token of the vocabulary that stands behind each step.")
    reward_tokens: tuple[str, ...] = Field(
        min_length=2, description="Tokens of the verdicts, the first for a right step, e.g. ['+', '-']."
    )
    labels: Literal["hard", "soft"] = Field(
        default="hard", description="hard: one verdict a step; soft: the probability that the step is right."
    )
    separator: str = Field(default="\n", description="What joins the steps of a solution.")

    @model_validator(mode="after")
    def _tokens(self) -> "PrmSettings":
        named = (self.placeholder_token, *self.reward_tokens)
        if len(set(named)) != len(named):
            raise ValueError(f"placeholder_token and reward_tokens must differ from one another; given {list(named)}")
        if self.labels == "soft" and len(self.reward_tokens) != 2:
            raise ValueError(f"soft labels want two reward_tokens, right and wrong; given {list(self.reward_tokens)}")
        if self.text.format == "text":
            raise ValueError("text.format `text` has no steps; use chat or template")
        return self


class DpoSettings(SupervisedSettings):
    """Direct preference optimisation (Rafailov et al. 2023), cDPO and IPO, on preference pairs."""

    metrics = ("loss", "accuracy", "margin", "rewards/chosen", "rewards/rejected")

    pairs: Annotated[OnPolicy, Neutral] = Field(
        default="data", description="data: data.pairs; on_policy: what the stage sample makes, with form pairs."
    )
    beta: float = Field(default=0.1, gt=0, description="Strength of the pull to the reference.")
    loss: Literal["sigmoid", "ipo"] = Field(default="sigmoid", description="DPO's, or IPO's (Azar et al. 2023).")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="cDPO: the probability that a pair's label is wrong."
    )
    nll_coef: float = Field(default=0.0, ge=0, description="Weight of the chosen response's negative log-likelihood.")
    reference: ModelSource | None = Field(
        default=None, description="The reference model; null: the model that training starts from."
    )

    @model_validator(mode="after")
    def _smoothing(self) -> "DpoSettings":
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError("label_smoothing goes with loss sigmoid; IPO has none")
        return self


class KtoSettings(SupervisedSettings):
    """KTO (Ethayarajh et al. 2024) on responses that are labelled good or bad, without pairs."""

    metrics = ("loss", "kl", "rewards/desirable", "rewards/undesirable")

    beta: float = Field(default=0.1, gt=0, description="Strength of the pull to the reference.")
    desirable_weight: float = Field(default=1.0, ge=0, description="Weight of good responses.")
    undesirable_weight: float = Field(default=1.0, ge=0, description="Weight of bad responses.")
    reference: ModelSource | None = Field(
        default=None, description="The reference model; null: the model that training starts from."
    )
