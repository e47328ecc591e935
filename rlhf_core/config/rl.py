"""Settings of PPO and of the evaluation, and the equations between their batch sizes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.algorithm import AlgorithmSettings
from rlhf_core.config.base import Neutral, Settings
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.config.training import Dtype, OptimizerSettings, TrainerSettings


class RolloutSettings(Settings):
    """What is sampled in each step. A rollout holds prompts x samples_per_prompt trajectories."""

    prompts: int = Field(gt=0, description="Prompts in a rollout.")
    samples_per_prompt: int = Field(default=1, gt=0, description="Responses drawn for each prompt.")
    max_new_tokens: int = Field(gt=0, description="Longest response, tokens.")
    max_prompt_len: int = Field(gt=0, description="Longest prompt, tokens.")
    temperature: float = Field(
        default=1.0, ge=0.01, description="Sampling temperature; log-probs of the trainer use it too."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="1: the trainer's log-probs know no nucleus.")

    @model_validator(mode="after")
    def _whole_distribution(self) -> "RolloutSettings":
        if self.top_p < 1:
            raise ValueError(
                f"top_p {self.top_p:g} samples from a part of the distribution, whose log-probs the trainer does not "
                "compute: ratios and KL would be wrong; give 1 and a lower temperature"
            )
        return self

    @property
    def trajectories(self) -> int:
        return self.prompts * self.samples_per_prompt


class CriticSettings(Settings):
    optimizer: OptimizerSettings = Field(description="The critic's learning rate and schedule.")
    init: Literal["rm", "policy"] | None = Field(
        default=None,
        description="Whose weights the critic starts from; null: the reward model's where reward.rm has weight, else "
        "the policy's.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Rollouts that train the critic alone.")


class EvaluationSettings(Settings):
    """Samples of each held-out prompt, beside the greedy one: pass@k for k = 1, 2, 4, ..., mean and majority."""

    samples_per_prompt: int = Field(default=0, ge=0, description="How many; 0: the greedy response alone.")
    temperature: float = Field(default=1.0, ge=0.01, description="Their temperature.")

    @property
    def ks(self) -> list[int]:
        """Of pass@k: powers of two up to samples_per_prompt, and that itself."""
        n = self.samples_per_prompt
        return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | ({n} if n else set()))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what an evaluation measures."""
        n = self.samples_per_prompt
        sampled = [f"mean@{n}", f"majority@{n}"] if n else []
        return ("exact_match", *sampled, *(f"pass@{k}" for k in self.ks))


class PpoSettings(Settings):
    """One RL stage for all algorithms; `algorithm.preset` names one."""

    policy: Literal["sft", "dpo", "kto"] = Field(
        default="sft", description="The stage whose model is trained, and is the reference of the KL penalty."
    )
    optimizer: OptimizerSettings = Field(description="The policy's learning rate and schedule.")
    critic: CriticSettings | None = Field(default=None, description="The critic; for estimator gae alone.")
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
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="Export, and evaluate, the moving average of the policy with this decay."
    )
    eval_steps: int | None = Field(default=None, gt=0, description="Steps between evaluations; first and last always.")
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, description="What they measure.")
    best_metric: str | None = Field(
        default=None, description="Export the step whose evaluation gave most of it; null: the last step."
    )
    sampler: SamplerSettings = Field(default_factory=SamplerSettings, description="The vLLM engine.")
    trainer: TrainerSettings = Field(default_factory=TrainerSettings, description="Ranks, ZeRO, saving.")
    generate_timeout_s: Annotated[float, Neutral] = Field(
        default=1800.0, gt=0, description="Longest wait for a rollout."
    )

    @property
    def critic_init(self) -> Literal["rm", "policy"] | None:
        """Whose weights the critic starts from, once null is resolved; None without a critic."""
        if self.critic is None:
            return None
        return self.critic.init or ("rm" if self.reward.rm else "policy")

    @property
    def warmup_steps(self) -> int:
        """Rollouts that train the critic alone."""
        return self.critic.warmup_steps if self.critic is not None else 0

    @property
    def needs_reward_model(self) -> bool:
        return bool(self.reward.rm) or self.critic_init == "rm"

    @property
    def needs_process_model(self) -> bool:
        return bool(self.reward.prm or self.algorithm.steps.coef)

    @model_validator(mode="after")
    def _equations(self) -> "PpoSettings":
        trajectories = self.rollout.trajectories
        if trajectories % self.batch_size:
            raise ValueError(
                f"a rollout has prompts {self.rollout.prompts} x samples_per_prompt {self.rollout.samples_per_prompt} "
                f"= {trajectories} trajectories, which is not a multiple of batch_size {self.batch_size}"
            )
        check_length(self.rollout.max_prompt_len, self.rollout.max_new_tokens, self.sampler.max_model_len)
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps {self.warmup_steps} leave none of {self.steps} steps to train the policy; "
                "give fewer than steps"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> "PpoSettings":
        algorithm = self.algorithm
        if algorithm.needs_critic and self.critic is None:
            raise ValueError("algorithm.estimator gae needs a critic; give critic.optimizer, or another estimator")
        if self.critic is not None and not algorithm.needs_critic:
            raise ValueError(
                f"algorithm.estimator {algorithm.estimator} has no use for a critic; leave `critic` out (null), or "
                "use estimator gae"
            )
        if algorithm.needs_groups and self.rollout.samples_per_prompt < 2:
            why = "dynamic_sampling" if algorithm.dynamic_sampling.enabled else f"estimator {algorithm.estimator}"
            raise ValueError(
                f"algorithm.{why} compares the responses of a group, and rollout.samples_per_prompt is "
                f"{self.rollout.samples_per_prompt}; give 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _best(self) -> "PpoSettings":
        if self.best_metric is not None and self.best_metric not in self.evaluation.metrics:
            raise ValueError(f"best_metric {self.best_metric!r} is none of {', '.join(self.evaluation.metrics)}")
        if self.best_metric is not None and self.trainer.save_steps is None:
            raise ValueError(
                f"best_metric {self.best_metric} keeps the best weights in a training checkpoint, and "
                f"trainer.save_steps is null; give it a number, or leave best_metric out"
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
