"""A pipeline's settings: one model a stage, read from a YAML file, with dotted overrides merged last."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings, SettingsError, parse_settings
from rlhf_core.config.data import DataSettings
from rlhf_core.config.rl import EvaluateSettings, PpoSettings
from rlhf_core.config.sampling import SampleSettings
from rlhf_core.config.supervised import (
    DpoSettings,
    KtoSettings,
    PrmSettings,
    RmSettings,
    SftSettings,
    SupervisedSettings,
)

# Section -> the data sets that its stage reads: the one it is trained on, then the others.
SECTION_DATA: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "sample": ("prompts",),
    "rm": ("pairs",),
    "prm": ("steps",),
    "dpo": ("pairs",),
    "kto": ("labelled",),
    "ppo": ("prompts", "eval"),
    "evaluate": ("eval",),
}
# Those that can read what the stage sample makes instead, by a setting that is called like the data set.
ON_POLICY = {"rm": "pairs", "dpo": "pairs", "prm": "steps"}
# Sections that make a causal model which can be sampled from, in the order in which they follow one another.
POLICIES = ("sft", "dpo", "kto", "ppo")


class TrackingSettings(Settings):
    """Where metrics go beside events.jsonl and the Prefect UI."""

    tensorboard: Annotated[bool, Neutral] = Field(default=False, description="TensorBoard files in the artifact.")
    every_steps: Annotated[int, Neutral] = Field(
        default=1,
        gt=0,
        description="TensorBoard and W&B get every so many training steps and all evaluations; metrics.jsonl, all.",
    )
    wandb_project: Annotated[str | None, Neutral] = Field(
        default=None, description="Weights & Biases project; null is off."
    )
    wandb_mode: Annotated[str, Neutral] = Field(
        default="offline", pattern="^(online|offline)$", description="W&B mode."
    )
    wandb_entity: Annotated[str | None, Neutral] = Field(
        default=None, min_length=1, description="W&B team or user; null: the account's own."
    )
    wandb_group: Annotated[str | None, Neutral] = Field(
        default=None, min_length=1, description="W&B group that the stages' runs are put into."
    )
    run_name: Annotated[str | None, Neutral] = Field(
        default=None,
        min_length=1,
        description="Stands before stage and key in a W&B run's name: <run_name>-sft-0123abcd.",
    )


class ClusterSettings(Settings):
    """The Ray cluster. The API keys of services are environment variables, never settings."""

    address: Annotated[str | None, Neutral] = Field(
        default=None, description="An existing Ray cluster; null starts a local one."
    )
    start_timeout_s: Annotated[float, Neutral] = Field(
        default=600.0, gt=0, description="Longest wait for ranks and engines to start, to load and to save."
    )


class RunSettings(Settings):
    """Where a run keeps things. None of it changes what is trained."""

    store: Annotated[str, Neutral] = Field(default=".rlhf/store", description="Directory or s3:// URL for artifacts.")
    scratch: Annotated[str, Neutral] = Field(
        default=".rlhf/scratch", description="Node-local directory for work in progress."
    )
    lease_ttl_s: Annotated[float, Neutral] = Field(
        default=60.0, ge=5, description="A lease not renewed for this long is free."
    )
    tracking: TrackingSettings = Field(default_factory=TrackingSettings, description="TensorBoard and W&B.")
    cluster: ClusterSettings = Field(default_factory=ClusterSettings, description="Ray.")


class PipelineSettings(Settings):
    """Everything that `sft-rm-ppo` takes: a section a stage. A stage without its section is not run."""

    run: RunSettings = Field(default_factory=RunSettings, description="Store, scratch, tracking.")
    data: DataSettings = Field(description="The data sets.")
    sft: SftSettings | None = Field(default=None, description="Supervised fine-tuning.")
    sample: SampleSettings | None = Field(default=None, description="A data set of a policy's own responses, scored.")
    rm: RmSettings | None = Field(default=None, description="The reward model.")
    prm: PrmSettings | None = Field(default=None, description="The process reward model.")
    dpo: DpoSettings | None = Field(default=None, description="Direct preference optimisation.")
    kto: KtoSettings | None = Field(default=None, description="KTO.")
    ppo: PpoSettings | None = Field(default=None, description="PPO.")
    evaluate: EvaluateSettings | None = Field(default=None, description="Greedy exact match on held-out prompts.")

    def policies(self) -> list[str]:
        """Sections that are there and make a policy. The first is what the others started from, where they did."""
        return [name for name in POLICIES if getattr(self, name) is not None]

    def on_policy(self) -> list[str]:
        """Sections that are trained on what the stage sample makes."""
        sections = {name: getattr(self, name) for name in ON_POLICY}
        return [
            name for name, one in sections.items() if one is not None and getattr(one, ON_POLICY[name]) == "on_policy"
        ]

    def models_of(self, section: str) -> dict[str, str]:
        """Input name -> the section whose model the stage of `section` starts from or is given."""
        if section in ("ppo", "sample"):
            one: PpoSettings | SampleSettings = getattr(self, section)
            rewards = {"reward": "rm"} if one.needs_reward_model else {}
            return {"policy": one.policy, **rewards, **({"process": "prm"} if one.needs_process_model else {})}
        return {"model": "sft"} if section != "sft" and getattr(self, section).model is None else {}

    @model_validator(mode="after")
    def _starting_points(self) -> "PipelineSettings":
        for name in ("rm", "prm", "dpo", "kto"):
            section: SupervisedSettings | None = getattr(self, name)
            if section is not None and section.model is None and self.sft is None:
                raise ValueError(
                    f"{name}.model: missing, and there is no section sft whose model {name} could start from; give "
                    f"{name}.model a `path` or a name on the `hub`, or add sft"
                )
        return self

    @model_validator(mode="after")
    def _ppo_inputs(self) -> "PipelineSettings":
        ppo = self.ppo
        if ppo is None:
            return self
        if getattr(self, ppo.policy) is None:
            others = [name for name in self.policies() if name != "ppo"]
            choice = f"set ppo.policy to {' or '.join(others)}" if others else "add one of sft, dpo, kto"
            raise ValueError(f"ppo.policy is {ppo.policy}, and there is no section {ppo.policy}; add it, or {choice}")
        if ppo.needs_reward_model and self.rm is None:
            setting = f"ppo.reward.rm is {ppo.reward.rm}" if ppo.reward.rm else "ppo.critic.init is rm"
            raise ValueError(
                f"{setting}, and there is no section rm that makes the reward model; add it, or change that"
            )
        if ppo.needs_process_model and self.prm is None:
            prm, steps = ppo.reward.prm, ppo.algorithm.steps.coef
            setting = f"ppo.reward.prm is {prm}" if prm else f"ppo.algorithm.steps.coef is {steps}"
            raise ValueError(
                f"{setting}, and there is no section prm that makes the process reward "
                f"model; add it, or set the weight to 0"
            )
        if ppo.ptx is not None and self.data.sft is None:
            raise ValueError("ppo.ptx reads data.sft, and there is none; give it a path, or leave ppo.ptx out")
        return self

    @model_validator(mode="after")
    def _sample_inputs(self) -> "PipelineSettings":
        sample = self.sample
        if sample is None:
            return self
        for setting, section in self._sample_models():
            if getattr(self, section) is None:
                raise ValueError(f"{setting}, and there is no section {section}; add it, or change that")
        above = self._sections_above_sample()
        for section in self.on_policy():
            if section in above:
                raise ValueError(
                    f"{section}.{ON_POLICY[section]} is on_policy, and sample itself needs {above[section]}; "
                    f"one of the two has to do without the other"
                )
        return self

    def _sample_models(self) -> list[tuple[str, str]]:
        """(setting of the section sample, the section whose model it asks for)."""
        sample = self.sample
        assert sample is not None  # the caller has looked
        asked = {"policy": f"sample.policy is {sample.policy}", "reward": f"sample.reward.rm is {sample.reward.rm}"}
        asked["process"] = f"sample.reward.prm is {sample.reward.prm}"
        return [(asked[name], section) for name, section in self.models_of("sample").items()]

    def _sections_above_sample(self) -> dict[str, str]:
        """Section -> what it is for, of those that have to be done before sample."""
        above: dict[str, str] = {}
        left = [(section, f"{section} ({setting})") for setting, section in self._sample_models()]
        while left:
            section, reason = left.pop()
            if section not in above:
                above[section] = reason
                left += [(other, reason) for other in self.models_of(section).values()]
        return above

    @model_validator(mode="after")
    def _on_policy(self) -> "PipelineSettings":
        sample = self.sample
        for name in self.on_policy():
            kind = ON_POLICY[name]
            setting = f"{name}.{kind} is on_policy"
            if sample is None:
                raise ValueError(
                    f"{setting}, and there is no section sample; add one of form {kind}, or set it to data"
                )
            if sample.form != kind:
                raise ValueError(f"{setting}, and sample.form is {sample.form}; set that to {kind}")
            if name == "rm" and sample.eval_share is None:
                raise ValueError(
                    f"{setting}, and rm needs held-out pairs, on which the reward model's accuracy and normalisation "
                    "are measured; give sample.eval_share"
                )
        if "prm" in self.on_policy() and sample is not None and self.prm is not None:
            for field in ("separator", "labels"):
                one, other = getattr(self.prm, field), getattr(sample.steps, field)
                if one != other:
                    raise ValueError(
                        f"prm.{field} is {one!r} and sample.steps.{field} {other!r}; prm.steps is on_policy, so give "
                        "both the same"
                    )
        return self

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> "PipelineSettings":
        if self.evaluate is not None and not self.policies():
            raise ValueError(
                f"evaluate has no policy to sample from; add one of {', '.join(POLICIES)}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _held_out_pairs(self) -> "PipelineSettings":
        pairs = self.data.pairs
        if self.rm is None or self.rm.pairs == "on_policy":
            return self
        if pairs is None or any(part.has_held_out for part in pairs.parts):
            return self
        generated = pairs.arithmetic is not None
        wanted = "arithmetic.eval_rows" if generated else "eval_path, eval_hub, eval_split or eval_share"
        raise ValueError(
            "rm needs held-out rows of data.pairs, on which the reward model's accuracy and normalisation are "
            f"measured; give data.pairs.{wanted}"
        )

    @model_validator(mode="after")
    def _data_sets(self) -> "PipelineSettings":
        for section, kinds in SECTION_DATA.items():
            for kind in kinds if section not in self.on_policy() else ():
                if getattr(self, section) is not None and getattr(self.data, kind) is None:
                    raise ValueError(f"{section} needs data.{kind}; give it a path, or leave {section} out")
        return self


def load_pipeline(path: str | Path, overrides: Iterable[str] = ()) -> PipelineSettings:
    """The settings of a pipeline file, with `overrides` such as `ppo.optimizer.lr=1e-6` merged last."""
    return parse_settings(PipelineSettings, apply_overrides(read_pipeline(path), overrides))


def read_pipeline(path: str | Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"pipeline file {path} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"pipeline file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"pipeline file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise SettingsError(
            f"pipeline file {path} holds no settings; it wants the keys data, {', '.join(SECTION_DATA)}"
        )
    return values


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `values` with each `dotted.name=YAML value` set; intermediate mappings are made where missing."""
    merged = _copied(values)
    for override in overrides:
        name, sign, text = override.partition("=")
        parts = name.strip().split(".")
        if not sign or not all(parts):
            raise SettingsError(f"set: {override!r} is not of the form stage.setting=VALUE, e.g. ppo.optimizer.lr=1e-6")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise SettingsError(f"set: the value of {override!r} is not YAML") from None
        target = merged
        for part in parts[:-1]:
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                raise SettingsError(f"set: {override!r} goes below {part!r}, which holds a value and no settings")
        target[parts[-1]] = value
    return merged


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return value
