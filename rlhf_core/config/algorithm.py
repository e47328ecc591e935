"""What an RL run minimises: estimator of advantages, policy loss, KL, corrections, shaping; and presets of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings

Preset = Literal[
    "ppo", "reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"
]  # fmt: skip
Estimator = Literal["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"]
GROUP_ESTIMATORS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")


class KlSettings(Settings):
    """Divergence of the policy from a reference: the policy that training starts from, or a later copy of it."""

    coef: float = Field(default=0.05, ge=0, description="Its weight; 0: no reference model is held.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log pi - log pi_ref."
    )
    place: Literal["reward", "loss"] = Field(
        default="reward", description="A penalty on each token's reward, or a summand of the loss."
    )
    unbiased_gradient: bool = Field(
        default=False, description="In the loss: the estimator's value with the gradient of KL(pi, pi_ref)."
    )
    target: float | None = Field(
        default=None,
        gt=0,
        description="KL of a trajectory, nats, that the coefficient is adapted towards; null: it is fixed.",
    )
    horizon: int = Field(default=10000, gt=0, description="Trajectories over which an adapted coefficient moves.")
    refresh_steps: int | None = Field(
        default=None, gt=0, description="Rollouts after which the reference becomes the policy; null: never."
    )

    @model_validator(mode="after")
    def _useful(self) -> "KlSettings":
        if self.place == "loss" and self.estimator == "k1" and self.coef and not self.unbiased_gradient:
            raise ValueError(
                "estimator k1 in the loss has a gradient of mean 0, so it would hold nothing; use k2, or k3, or set "
                "unbiased_gradient, or place reward"
            )
        if self.place == "reward" and self.unbiased_gradient:
            raise ValueError("unbiased_gradient is for place loss: in the reward the KL has no gradient of its own")
        if not self.coef and (self.target is not None or self.refresh_steps is not None):
            raise ValueError("coef 0 holds no reference, so target and refresh_steps mean nothing; leave them out")
        return self


class MismatchSettings(Settings):
    """Importance weights against the sampler's log-probs, which differ from the trainer's for the same weights."""

    level: Literal["off", "token", "sequence"] = Field(default="off", description="What is weighed as one.")
    mode: Literal["mask", "clip"] = Field(
        default="mask", description="Outside the band: left out, or the weight is clipped to it."
    )
    statistic: Literal["ratio", "binary_kl", "tv"] = Field(
        default="ratio", description="What has to lie in the band; clip knows ratio alone."
    )
    low: float = Field(default=0.5, ge=0, description="Lower end of the band.")
    high: float = Field(default=5.0, gt=0, description="Upper end of the band.")

    @model_validator(mode="after")
    def _band(self) -> "MismatchSettings":
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}; swap them")
        if self.mode == "clip" and self.statistic != "ratio":
            raise ValueError(f"mode clip clips the ratio, not {self.statistic}; use statistic ratio, or mode mask")
        return self


class ShapingSettings(Settings):
    """What happens to a trajectory's reward before baselines, in this order."""

    normalise: bool = Field(
        default=False, description="Less the mean of all rewards of the run so far, over their standard deviation."
    )
    clip: tuple[float, float] | None = Field(default=None, description="Least and largest reward; null: no bounds.")
    truncation: float | None = Field(
        default=None,
        le=1,
        description="Of responses that were cut off: 0 to 1 multiplies the reward, below 0 replaces it; null: kept.",
    )
    overlong_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Last share of max_new_tokens over which the reward falls by overlong_factor; 0: no penalty.",
    )
    overlong_factor: float = Field(default=1.0, gt=0, description="Penalty of a response of max_new_tokens.")

    @model_validator(mode="after")
    def _bounds(self) -> "ShapingSettings":
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip {list(self.clip)}: the first is the lower bound; swap them")
        return self


class DynamicSamplingSettings(Settings):
    """Groups whose scores are all equal teach nothing and are replaced by groups of further prompts (DAPO)."""

    enabled: bool = Field(default=False, description="Whether they are.")
    min_spread: float = Field(
        default=0.0, ge=0, description="A group is kept if its largest and smallest score differ by more."
    )
    max_rounds: int = Field(
        default=4, gt=0, description="Times that the sampler is asked in a step; then groups without spread fill up."
    )


class StepRewardSettings(Settings):
    """A process reward model's verdicts as rewards of their steps, beside the outcome's reward."""

    coef: float = Field(default=0.0, ge=0, description="Their weight; 0: none.")
    form: Literal["sum", "progress"] = Field(
        default="progress", description="sum: the probability p_k that step k is right. progress: p_k - p_{k-1}."
    )


class AlgorithmSettings(Settings):
    """Any estimator goes with any loss. Defaults are those of PPO with a critic (Ouyang et al. 2022)."""

    preset: Annotated[Preset | None, Neutral] = Field(
        default=None, description="Fills what is not given with the values of a published algorithm."
    )
    estimator: Estimator = Field(default="gae", description="How rewards become advantages; gae alone has a critic.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount of each further action token.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="GAE's lambda.")
    bootstrap_truncated: bool = Field(
        default=False, description="GAE: a response that was cut off goes on with the critic's value instead of 0."
    )
    normalise: Literal["none", "mean", "mean_std"] = Field(
        default="mean_std", description="Advantages over all action tokens of a rollout: mean 0, and std 1."
    )
    loss: Literal["clip", "gspo", "cispo"] = Field(
        default="clip", description="clip: PPO's. gspo: one ratio a sequence. cispo: clipped weights, no token masked."
    )
    clip_low: float = Field(default=0.2, gt=0, le=1, description="Ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="Ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Largest ratio where the advantage is negative; null: no bound."
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        default="token_mean",
        description="Mean over tokens; over sequences of their means; sum over sequences by max_new_tokens.",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the policy's entropy as a bonus.")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="Values move at most this far from those of the rollout; null: freely."
    )
    kl: KlSettings = Field(default_factory=KlSettings, description="Divergence from the reference.")
    mismatch: MismatchSettings = Field(default_factory=MismatchSettings, description="Sampler against trainer.")
    shaping: ShapingSettings = Field(default_factory=ShapingSettings, description="Rewards before baselines.")
    steps: StepRewardSettings = Field(default_factory=StepRewardSettings, description="Rewards of steps.")
    dynamic_sampling: DynamicSamplingSettings = Field(
        default_factory=DynamicSamplingSettings, description="Groups without spread are replaced."
    )

    @property
    def needs_critic(self) -> bool:
        return self.estimator == "gae"

    @property
    def needs_groups(self) -> bool:
        """Whether a response is compared with others of its group."""
        return self.estimator in GROUP_ESTIMATORS or self.dynamic_sampling.enabled

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """Fields that are not given get the preset's values."""
        preset = values.get("preset") if isinstance(values, Mapping) else None
        return _filled(values, PRESETS[preset]) if preset in PRESETS else values

    @model_validator(mode="after")
    def _combinations(self) -> "AlgorithmSettings":
        if self.bootstrap_truncated and not self.needs_critic:
            raise ValueError(f"bootstrap_truncated needs a critic, which estimator {self.estimator} has not; use gae")
        if self.dual_clip is not None and self.loss == "cispo":
            raise ValueError("dual_clip bounds the ratio of loss clip and gspo; cispo's weights have clip_high")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip {self.dual_clip:g} must be above 1 + clip_high = {1 + self.clip_high:g}")
        return self


# What each published algorithm sets, where it differs from the defaults above.
_GROUP: dict[str, Any] = {"estimator": "group_norm", "normalise": "none", "kl": {"coef": 0.0}}
PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {},
    # Hu et al. 2025, "REINFORCE++": a KL penalty on each token, advantages normalised over the whole rollout.
    "reinforce_pp": {"estimator": "reinforce", "kl": {"coef": 0.01}},
    # The same with the group's mean as baseline and k2 in the loss.
    "reinforce_pp_baseline": {
        "estimator": "reinforce_baseline",
        "kl": {"coef": 0.001, "estimator": "k2", "place": "loss"},
    },
    # Ahmadian et al. 2024.
    "rloo": {"estimator": "rloo", "normalise": "none"},
    # Shao et al. 2024, "DeepSeekMath": beta 0.04, k3 in the loss, mean over responses of their tokens' mean.
    "grpo": {
        "estimator": "group_norm",
        "normalise": "none",
        "aggregation": "sequence_mean",
        "kl": {"coef": 0.04, "estimator": "k3", "place": "loss"},
    },
    # Liu et al. 2025, "Understanding R1-Zero-Like Training": neither the deviation nor the length divides.
    "dr_grpo": {"estimator": "dr_grpo", "normalise": "none", "aggregation": "constant", "kl": {"coef": 0.0}},
    # Yu et al. 2025, "DAPO": a higher upper bound, groups with spread, token mean, a penalty on overlong responses.
    "dapo": {
        **_GROUP,
        "clip_high": 0.28,
        "shaping": {"overlong_share": 0.2},
        "dynamic_sampling": {"enabled": True},
    },
    # Zheng et al. 2025, "Group Sequence Policy Optimization", section 5.1.
    "gspo": {**_GROUP, "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    # MiniMax 2025, "MiniMax-M1": no lower bound; the largest weight, 5, of Khatri et al. 2025, "ScaleRL".
    "cispo": {**_GROUP, "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
}


def _filled(given: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with what it lacks from `defaults`, group by group."""
    values = dict(given) if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)
    for name, default in defaults.items():
        if name not in values:
            values[name] = default
        elif isinstance(default, Mapping) and isinstance(values[name], Mapping | Settings):
            values[name] = _filled(values[name], default)
    return values
