"""Which stages a pipeline has, what each reads, and the key of each, before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.config.base import Settings, key_settings
from rlhf_core.config.data import DataSource, PrepareDataSettings
from rlhf_core.config.pipeline import PipelineSettings
from rlhf_core.store.keys import StageKey, stage_key
from stages.definition import Stage
from stages.evaluate import EVALUATE
from stages.inputs import data_fingerprints, model_digest
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
            add(f"data-{kind}", PREPARE_DATA, prepare, {}, {}, data_fingerprints(kind, source))
    add("sft", SFT, settings.sft, {"data": "data-sft"}, model_digest(settings.sft.model), {})
    add("rm", RM, settings.rm, {"model": "sft", "data": "data-pairs"}, {}, {})
    ppo_inputs = {"policy": "sft", "reward": "rm", "prompts": "data-prompts", "eval": "data-eval"}
    add("ppo", PPO, settings.ppo, ppo_inputs, {}, {})
    add("evaluate", EVALUATE, settings.evaluate, {"sft": "sft", "ppo": "ppo", "data": "data-eval"}, {}, {})
    return list(plan.values())
