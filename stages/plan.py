"""Which stages a pipeline has, what each reads, and the key of each, before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.base import Settings, SettingsError, key_settings
from rlhf_core.config.data import DataSource, PrepareDataSettings
from rlhf_core.config.pipeline import PipelineSettings
from rlhf_core.config.training import ModelSource
from rlhf_core.data.arithmetic import GENERATOR_VERSION
from rlhf_core.store.keys import StageKey, directory_digest, remote_fingerprint, stage_key
from stages.definition import Stage
from stages.evaluate import EVALUATE
from stages.ppo import PPO
from stages.prepare_data import PREPARE_DATA
from stages.rm import RM
from stages.sft import SFT

STAGES: dict[str, Stage] = {stage.name: stage for stage in (PREPARE_DATA, SFT, RM, PPO, EVALUATE)}


@dataclass(frozen=True)
class PlannedStage:
    """One node of the graph. `inputs` maps an input's name to the node that makes it."""

    node: str
    stage: Stage
    settings: Settings
    inputs: Mapping[str, str]
    key: StageKey


def plan_pipeline(settings: PipelineSettings) -> list[PlannedStage]:
    """The nodes in an order in which each comes after its inputs. Reads data files; starts nothing.

    Raises SettingsError for a data file or model directory that does not exist.
    """
    plan: dict[str, PlannedStage] = {}

    def add(
        node: str, stage: Stage, own: Settings, inputs: dict[str, str], foreign: dict[str, str], data: dict
    ) -> None:
        input_keys = {name: plan[source].key.key for name, source in inputs.items()} | foreign
        key = stage_key(
            stage=stage.name, version=stage.version, settings=key_settings(own), inputs=input_keys, data=data, code={}
        )
        plan[node] = PlannedStage(node, stage, own, inputs, key)

    for kind in ("sft", "pairs", "steps", "prompts", "eval"):
        source: DataSource | None = getattr(settings.data, kind)
        if source is not None:
            prepare = PrepareDataSettings(dataset=kind, source=source)
            add(f"data-{kind}", PREPARE_DATA, prepare, {}, {}, _data_fingerprints(kind, source))
    add("sft", SFT, settings.sft, {"data": "data-sft"}, _model_digest(settings.sft.model), {})
    add("rm", RM, settings.rm, {"model": "sft", "data": "data-pairs"}, {}, {})
    ppo_inputs = {"policy": "sft", "reward": "rm", "prompts": "data-prompts", "eval": "data-eval"}
    add("ppo", PPO, settings.ppo, ppo_inputs, {}, {})
    add("evaluate", EVALUATE, settings.evaluate, {"sft": "sft", "ppo": "ppo", "data": "data-eval"}, {}, {})
    return list(plan.values())


def _data_fingerprints(kind: str, source: DataSource) -> dict[str, str]:
    prints = {"generator": f"arithmetic-{GENERATOR_VERSION}"} if source.arithmetic else {}
    for name, url in (("path", source.path), ("eval_path", source.eval_path)):
        if url is not None:
            try:
                prints[name] = remote_fingerprint(url)
            except FileNotFoundError:
                raise SettingsError(
                    f"data.{kind}.{name}: file {url} does not exist; give the path or s3:// URL of a data file"
                ) from None
    return prints


def _model_digest(source: ModelSource) -> dict[str, str]:
    if source.path is None:
        return {}
    check_model_directory(source.path)
    return {"model": directory_digest(source.path)}


def check_model_directory(path: str) -> None:
    """Refuses what no engine could load, before one starts."""
    directory = Path(path)
    wanted = {
        "config.json": ["config.json"],
        "weights (*.safetensors)": ["*.safetensors"],
        "tokenizer.json": ["tokenizer.json", "tokenizer.model"],
    }
    if not directory.is_dir():
        raise SettingsError(f"sft.model.path: {path} is not a directory; give a Hugging Face model directory")
    for what, patterns in wanted.items():
        if not any(any(directory.glob(pattern)) for pattern in patterns):
            raise SettingsError(f"sft.model.path: {path} has no {what}; give a complete Hugging Face model directory")
