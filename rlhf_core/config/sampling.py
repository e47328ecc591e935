"""Settings of the stage sample: what is drawn from a policy, how it is scored, and which rows are made of it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.rl import check_length
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.config.shapes import DatasetKind

Form = Literal["generations", "best_of_n", "rejection", "pairs", "steps"]


class RejectionForm(Settings):
    """SFT rows of all samples that are good enough."""

    threshold: float = Field(default=1.0, description="Least reward of a sample that becomes a row.")
    max_per_prompt: int | None = Field(
        default=None, gt=0, description="At most so many rows of a prompt, the best ones; null: all."
    )


class PairForm(Settings):
    """Preference pairs of a prompt's own samples; margin is the difference of their rewards."""

    which: Literal["best_worst", "all"] = Field(
        default="best_worst", description="The best sample against the worst, or every sample against every other."
    )
    min_margin: float = Field(
        default=0.0, ge=0, description="Pairs with less margin are left out; so are those with none at all."
    )
    max_per_prompt: int | None = Field(
        default=None, gt=0, description="At most so many pairs of a prompt, drawn by the seed; null: all."
    )


class StepForm(Settings):
    """Step labels by Monte-Carlo completion (Wang et al. 2024, Math-Shepherd)."""

    completions: int = Field(default=8, gt=0, description="Completions of each beginning of a solution.")
    right_at: float = Field(default=1.0, description="Least reward of a solution that is right.")
    labels: Literal["hard", "soft"] = Field(
        default="hard", description="hard: whether any completion is right; soft: the share that is."
    )
    separator: str = Field(default="\n", min_length=1, description="What stands between steps, as in the stage prm.")


class ScorerSettings(Settings):
    """The process that holds the reward models, once the sampler has ended."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="bfloat16", description="Type of the weights.")
    attention: Annotated[Literal["eager", "sdpa", "flash_attention_2"], Neutral] = Field(
        default="sdpa", description="Attention kernel."
    )
    batch_size: Annotated[int, Neutral] = Field(default=16, gt=0, description="Sequences in a forward pass.")
    timeout_s: Annotated[float, Neutral] = Field(
        default=1800.0, gt=0, description="Longest wait for the scores of 64 x batch_size sequences."
    )


class SampleSettings(Settings):
    """Samples of a policy, scored, as a data set. `form` says which rows are made of them."""

    form: Form = Field(
        description="generations: a row for each sample; best_of_n: the best of each prompt, for SFT; rejection: all "
        "that are good enough, for SFT; pairs: preference pairs; steps: solutions with step labels."
    )
    policy: Literal["sft", "dpo", "kto", "ppo"] = Field(default="sft", description="The stage whose model is sampled.")
    samples_per_prompt: int = Field(gt=0, description="Responses drawn for each prompt of data.prompts.")
    max_new_tokens: int = Field(gt=0, description="Longest response, tokens.")
    max_prompt_len: int = Field(gt=0, description="Longest prompt, tokens; longer ones are left out and counted.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Sampled from the most probable tokens of this mass.")
    reward: RewardSettings = Field(description="What scores the samples; labels are those of data.prompts.")
    rejection: RejectionForm = Field(default_factory=RejectionForm, description="For form rejection.")
    pairs: PairForm = Field(default_factory=PairForm, description="For form pairs.")
    steps: StepForm = Field(default_factory=StepForm, description="For form steps.")
    eval_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Hold out the rows of about this share of the prompts, by a hash of the prompt.",
    )
    seed: int = Field(default=0, ge=0, description="Of the samples, and of the pairs that max_per_prompt leaves.")
    sampler: SamplerSettings = Field(default_factory=SamplerSettings, description="The vLLM engine.")
    scorer: ScorerSettings = Field(default_factory=ScorerSettings, description="The reward models.")
    generate_timeout_s: Annotated[float, Neutral] = Field(
        default=1800.0, gt=0, description="Longest wait for 8 x sampler.max_num_seqs responses."
    )

    @property
    def kind(self) -> DatasetKind:
        """Whose rows these are like."""
        return KIND[self.form]

    @property
    def needs_reward_model(self) -> bool:
        return bool(self.reward.rm)

    @property
    def needs_process_model(self) -> bool:
        return bool(self.reward.prm)

    @model_validator(mode="after")
    def _lengths(self) -> "SampleSettings":
        check_length(self.max_prompt_len, self.max_new_tokens, self.sampler.max_model_len)
        return self

    @model_validator(mode="after")
    def _form(self) -> "SampleSettings":
        for form, default in (("rejection", RejectionForm()), ("pairs", PairForm()), ("steps", StepForm())):
            if self.form != form and getattr(self, form) != default:
                raise ValueError(f"`{form}` goes with form {form}, and form is {self.form}; leave it out")
        if self.form == "pairs" and self.samples_per_prompt < 2:
            raise ValueError(
                f"form pairs compares the samples of a prompt, and samples_per_prompt is {self.samples_per_prompt}; "
                "give 2 or more"
            )
        if self.pairs.which == "best_worst" and self.pairs.max_per_prompt is not None:
            raise ValueError("pairs.max_per_prompt goes with which all; best_worst makes one pair of a prompt")
        return self

    @model_validator(mode="after")
    def _spread(self) -> "SampleSettings":
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature {self.temperature:g} is below 0.01, the least that vLLM samples at; give 0")
        several = {"samples_per_prompt": self.samples_per_prompt}
        if self.form == "steps":
            several["steps.completions"] = self.steps.completions
        for name, count in several.items():
            if self.temperature == 0 and count > 1:
                raise ValueError(f"temperature 0 makes all {count} of {name} the same; give a higher one, or {name} 1")
        return self


KIND: dict[Form, DatasetKind] = {
    "generations": "sft",
    "best_of_n": "sft",
    "rejection": "sft",
    "pairs": "pairs",
    "steps": "steps",
}
