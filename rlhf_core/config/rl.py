"""Settings of PPO and of the evaluation, and the equations between their batch sizes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.algorithm import AlgorithmSettings
from rlhf_core.config.base import Neutral, Settings
from rlhf_core.config.rewards import RewardSettings, SandboxSettings
from rlhf_core.config.sampler import SamplerSettings
from rlhf_core.config.supervised import TextSettings
from rlhf_core.config.training import Dtype, LoraSettings, OptimizerSettings, TrainerSettings


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


class PtxSettings(Settings):
    """PPO-ptx (Ouyang et al. 2022, eq. 2): every optimizer step of the policy also sees rows of `data.sft`."""

    coef: float = Field(gt=0, description="Weight of their mean SFT loss beside the policy's.")
    batch_size: int | None = Field(
        default=None, gt=0, description="Rows an optimizer step sees, over all ranks; null: as many as trajectories."
    )
    max_len: int = Field(gt=0, description="Longest row, tokens.")
    text: TextSettings = Field(default_factory=TextSettings, description="From rows to tokens.")


class CriticSettings(Settings):
    optimizer: OptimizerSettings = Field(description="The critic's learning rate and schedule.")
    lora: LoraSettings | None = Field(default=None, description="Train adapters of the critic, and its head whole.")
    freeze: tuple[str, ...] = Field(
        default=(), description="Regular expressions; the critic's parameters that one of them finds stay as they are."
    )
    aux_loss_coef: float = Field(default=0.0, ge=0, description="Weight of its experts' load-balancing loss.")
    init: Literal["rm", "policy"] | None = Field(
        default=None,
        description="Whose weights the critic starts from; null: the reward model's where reward.rm has weight, else "
        "the policy's.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Rollouts that train the critic alone.")


class EvaluationSettings(Settings):
    """The greedy response to each held-out prompt, and samples: pass@k for k = 1, 2, 4, ..., mean and majority."""

    samples_per_prompt: int = Field(
        default=0, ge=0, description="Samples beside the greedy response; 0: that one alone."
    )
    temperature: float = Field(default=1.0, ge=0.01, description="Of the samples.")
    verifier: Literal["exact", "math"] = Field(
        default="exact", description="What says whether a response is right; math: math-verify, in the sandbox."
    )
    shown_prompts: Annotated[int, Neutral] = Field(
        default=8, ge=0, description="Prompts whose greedy responses are kept of every evaluation."
    )
    sandbox: SandboxSettings = Field(
        default_factory=SandboxSettings, description="Processes for `math`, as `reward.sandbox`."
    )

    @property
    def ks(self) -> list[int]:
        """Of pass@k: powers of two up to samples_per_prompt, and that itself."""
        n = self.samples_per_prompt
        return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | ({n} if n else set()))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what an evaluation scores; with /<source> behind them, of the prompts of a source."""
        n = self.samples_per_prompt
        math = ["math_match"] if self.verifier == "math" else []
        sampled = [f"mean@{n}", f"majority@{n}"] if n else []
        return ("exact_match", *math, *sampled, *(f"pass@{k}" for k in self.ks))


class PpoSettings(Settings):
    """One RL stage for all algorithms; `algorithm.preset` names one."""

    policy: Literal["sft", "dpo", "kto"] = Field(
        default="sft", description="The stage whose model is trained, and is the reference of the KL penalty."
    )
    optimizer: OptimizerSettings = Field(description="The policy's learning rate and schedule.")
    lora: LoraSettings | None = Field(
        default=None, description="Train adapters of the policy; the KL's reference is the policy without them."
    )
    freeze: tuple[str, ...] = Field(
        default=(), description="Regular expressions; the policy's parameters that one of them finds stay as they are."
    )
    aux_loss_coef: float = Field(
        default=0.0, ge=0, description="Weight of the load-balancing loss of the policy's experts."
    )
    ptx: PtxSettings | None = Field(default=None, description="PPO-ptx: SFT beside RL.")
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
        default=1800.0, gt=0, description="Longest wait for 8 x sampler.max_num_seqs responses."
    )
    dump_rollouts: Annotated[bool, Neutral] = Field(
        default=False, description="Keep every rollout in the store, to train on them again with `rlhf replay`."
    )

    @property
    def critic_init(self) -> Literal["rm", "policy"] | None:
        """Whose weights the critic starts from, once null is resolved; None without a critic."""
        if self.critic is None:
            return None
        return self.critic.init or ("rm" if self.reward.rm else "policy")

    @property
    def ptx_rows(self) -> int:
        """Rows of PPO-ptx that an optimizer step of the policy sees; 0 without it."""
        return 0 if self.ptx is None else self.ptx.batch_size or self.batch_size

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
    def _models_fit(self) -> "PpoSettings":
        kl, tensor = self.algorithm.kl, self.trainer.tensor_parallel
        refreshed = kl.coef > 0 and kl.refresh_steps is not None
        if self.lora is not None and refreshed:
            raise ValueError(
                f"algorithm.kl.refresh_steps {kl.refresh_steps} makes the policy its reference, and with lora that is "
                "the policy without its adapters; leave one of them out"
            )
        if refreshed and tensor > 1 and self.trainer.zero_stage == 3:
            raise ValueError(
                f"algorithm.kl.refresh_steps {kl.refresh_steps} with trainer.tensor_parallel {tensor} and zero_stage "
                "3: DeepSpeed divides the reference twice, and it cannot be replaced; use zero_stage 2 or less"
            )
        for name, lora in (("lora", self.lora), ("critic.lora", self.critic.lora if self.critic is not None else None)):
            if lora is None:
                continue
            if lora.load_in_4bit:
                raise ValueError(
                    f"{name}.load_in_4bit is for supervised stages: RL hands whole weights to its sampler after each "
                    "step; set it to false"
                )
            if lora.dropout:
                raise ValueError(
                    f"{name}.dropout {lora.dropout:g}: RL compares log-probs before and after an update, and dropout "
                    "would make their ratios noise; set it to 0"
                )
            if tensor > 1:
                raise ValueError(
                    f"{name} with trainer.tensor_parallel {tensor}: DeepSpeed would divide adapters as well; use "
                    "trainer.zero_stage 3, which divides all weights"
                )
        return self

    @model_validator(mode="after")
    def _best(self) -> "PpoSettings":
        if self.best_metric is not None and self.best_metric.partition("/")[0] not in self.evaluation.metrics:
            raise ValueError(f"best_metric {self.best_metric!r} is none of {', '.join(self.evaluation.metrics)}")
        if self.best_metric is not None and self.trainer.save_steps is None:
            raise ValueError(
                f"best_metric {self.best_metric} keeps the best weights in a training checkpoint, and "
                f"trainer.save_steps is null; give it a number, or leave best_metric out"
            )
        return self


class EvaluateSettings(Settings):
    """What each policy of the pipeline answers to the held-out prompts."""

    max_new_tokens: int = Field(gt=0, description="Longest response, tokens.")
    max_prompt_len: int = Field(gt=0, description="Longest prompt, tokens.")
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, description="What is measured.")
    seed: int = Field(default=0, ge=0, description="Of the samples.")
    sampler: SamplerSettings = Field(default_factory=SamplerSettings, description="The vLLM engine.")
    generate_timeout_s: Annotated[float, Neutral] = Field(
        default=1800.0, gt=0, description="Longest wait for 8 x sampler.max_num_seqs responses."
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
