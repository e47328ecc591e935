"""Settings of PPO and of the evaluation, and the equations between their batch sizes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.config.training import Dtype, OptimizerSettings, TrainerSettings, check_batch


class RolloutSettings(Settings):
    """What is sampled in each step. A rollout holds prompts x samples_per_prompt trajectories."""

    prompts: int = Field(gt=0, description="Prompts in a rollout.")
    samples_per_prompt: int = Field(default=1, gt=0, description="Responses drawn for each prompt.")
    max_new_tokens: int = Field(gt=0, description="Longest response, tokens.")
    max_prompt_len: int = Field(gt=0, description="Longest prompt, tokens.")
    temperature: float = Field(
        default=1.0, ge=0.01, description="Sampling temperature; log-probs of the trainer use it too."
    )

    @property
    def trajectories(self) -> int:
        return self.prompts * self.samples_per_prompt


class AlgorithmSettings(Settings):
    """PPO (Schulman et al. 2017) with a critic and a KL penalty in the reward (Ouyang et al. 2022)."""

    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount of GAE.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="GAE's lambda.")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="Ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="Ratio is clipped above 1 + clip_high.")
    value_clip: float = Field(default=0.2, gt=0, description="Values move at most this far from those of the rollout.")
    kl_coef: float = Field(
        default=0.05, ge=0, description="Weight of the k1 KL estimate against the starting policy, in the reward."
    )
    whiten_advantages: bool = Field(
        default=True, description="Advantages of a rollout get mean 0 and standard deviation 1."
    )


class CriticSettings(Settings):
    optimizer: OptimizerSettings = Field(description="The critic's learning rate and schedule.")
    init: Literal["rm", "policy"] | None = Field(
        default=None,
        description="Whose weights the critic starts from; null: the reward model's where reward.rm has weight, else "
        "the policy's.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Rollouts that train the critic alone.")


class PpoSettings(Settings):
    policy: Literal["sft", "dpo", "kto"] = Field(
        default="sft", description="The stage whose model is trained, and is the reference of the KL penalty."
    )
    optimizer: OptimizerSettings = Field(description="The policy's learning rate and schedule.")
    critic: CriticSettings = Field(description="The critic.")
    rollout: RolloutSettings = Field(description="What is sampled.")
    reward: RewardSettings = Field(description="What is rewarded.")
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings, description="Loss and advantages.")
    steps: int = Field(gt=0, description="Rollouts; each is followed by `epochs` passes over it.")
    batch_size: int = Field(gt=0, description="Trajectories an optimizer step sees, over all ranks.")
    epochs: int = Field(default=1, gt=0, description="Passes over a rollout.")
    seed: int = Field(default=0, ge=0, description="Order of prompts, sampling, order of trajectories.")
    dtype: Dtype = Field(
        default="bfloat16", description="Trained weights' dtype; bfloat16 trains with fp32 master weights."
    )
    eval_steps: int | None = Field(
        default=None, gt=0, description="Steps between greedy evaluations; first and last always."
    )
    sampler: SamplerSettings = Field(default_factory=SamplerSettings, description="The vLLM engine.")
    trainer: TrainerSettings = Field(default_factory=TrainerSettings, description="Ranks, ZeRO, saving.")
    generate_timeout_s: Annotated[float, Neutral] = Field(
        default=1800.0, gt=0, description="Longest wait for a rollout."
    )

    @property
    def critic_init(self) -> Literal["rm", "policy"]:
        """Whose weights the critic starts from, once null is resolved."""
        return self.critic.init or ("rm" if self.reward.rm else "policy")

    @property
    def needs_reward_model(self) -> bool:
        return bool(self.reward.rm) or self.critic_init == "rm"

    @model_validator(mode="after")
    def _equations(self) -> "PpoSettings":
        trajectories = self.rollout.trajectories
        if trajectories % self.batch_size:
            raise ValueError(
                f"a rollout has prompts {self.rollout.prompts} x samples_per_prompt {self.rollout.samples_per_prompt} "
                f"= {trajectories} trajectories, which is not a multiple of batch_size {self.batch_size}"
            )
        check_batch(self.batch_size, self.trainer.ranks)
        check_length(self.rollout.max_prompt_len, self.rollout.max_new_tokens, self.sampler.max_model_len)
        if self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps {self.critic.warmup_steps} leave none of {self.steps} steps to train the policy; "
                "give fewer than steps"
            )
        return self


class EvaluateSettings(Settings):
    """Greedy exact match on the held-out prompts, for each policy of the pipeline."""

    max_new_tokens: int = Field(gt=0, description="Longest response, tokens.")
    max_prompt_len: int = Field(gt=0, description="Longest prompt, tokens.")
    sampler: SamplerSettings = Field(default_factory=SamplerSettings, description="The vLLM engine.")
    generate_timeout_s: Annotated[float, Neutral] = Field(
        default=1800.0, gt=0, description="Longest wait for the samples."
    )

    @model_validator(mode="after")
    def _equations(self) -> "EvaluateSettings":
        check_length(self.max_prompt_len, self.max_new_tokens, self.sampler.max_model_len)
        return self


def check_length(prompt: int, response: int, model: int) -> None:
    if prompt + response > model:
        raise ValueError(
            f"max_prompt_len {prompt} + max_new_tokens {response} = {prompt + response} tokens do not fit "
            f"sampler.max_model_len {model}; raise it or shorten one of them"
        )
