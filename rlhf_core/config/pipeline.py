"""A pipeline's settings: one model a stage, read from a YAML file, with dotted overrides merged last."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from rlhf_core.config.base import Neutral, Settings, SettingsError, parse_settings
from rlhf_core.config.data import DataSettings
from rlhf_core.config.rl import EvaluateSettings, PpoSettings
from rlhf_core.config.supervised import RmSettings, SftSettings


class TrackingSettings(Settings):
    """Where metrics go beside events.jsonl and the Prefect UI."""

    tensorboard: Annotated[bool, Neutral] = Field(default=False, description="TensorBoard files in the artifact.")
    wandb_project: Annotated[str | None, Neutral] = Field(
        default=None, description="Weights & Biases project; null is off."
    )
    wandb_mode: Annotated[str, Neutral] = Field(
        default="offline", pattern="^(online|offline)$", description="W&B mode."
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
    """Everything that `sft-rm-ppo` takes: a model a stage."""

    run: RunSettings = Field(default_factory=RunSettings, description="Store, scratch, tracking.")
    data: DataSettings = Field(description="The data sets.")
    sft: SftSettings = Field(description="Supervised fine-tuning.")
    rm: RmSettings = Field(description="The reward model.")
    ppo: PpoSettings = Field(description="PPO.")
    evaluate: EvaluateSettings = Field(description="Greedy exact match on held-out prompts.")


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
        raise SettingsError(f"pipeline file {path} holds no settings; it wants the keys data, sft, rm, ppo, evaluate")
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
