"""Which stages a pipeline has, what each reads, and the key of each, before anything runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from rlhf_core.config.base import Settings, key_settings
from rlhf_core.config.data import DatasetKind, DataSource, PrepareDataSettings
from rlhf_core.config.pipeline import SECTION_DATA, PipelineSettings
from rlhf_core.config.supervised import SupervisedSettings
from rlhf_core.store.keys import StageKey, stage_key
from stages.definition import Stage
from stages.dpo import DPO
from stages.evaluate import EVALUATE
from stages.inputs import code_digests, data_fingerprints, foreign_models, pinned
from stages.kto import KTO
from stages.ppo import PPO
from stages.prepare_data import PREPARE_DATA
from stages.prm import PRM
from stages.rm import RM
from stages.sample import SAMPLE
from stages.sft import SFT

STAGES: dict[str, Stage] = {
    stage.name: stage for stage in (PREPARE_DATA, SFT, SAMPLE, RM, PRM, DPO, KTO, PPO, EVALUATE)
}
SUPERVISED = ("sft", "rm", "prm", "dpo", "kto")


@dataclass(frozen=True)
class PlannedStage:
    """One node of the graph. `inputs` maps an input's name to the node that makes it."""

    node: str
    stage: Stage
    settings: Settings
    inputs: Mapping[str, str]
    key: StageKey


@dataclass(frozen=True)
class _Node:
    """A node before its key: `inputs` as above; digests of foreign models, fingerprints of data, digests of code."""

    node: str
    stage: Stage
    settings: Settings
    inputs: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)


def plan_pipeline(settings: PipelineSettings) -> list[PlannedStage]:
    """The nodes in an order in which each comes after its inputs. Reads data files; starts nothing.

    Raises SettingsError for a data file, model directory or other file named by the settings that does not exist.
    """
    plan: dict[str, PlannedStage] = {}
    for node in _in_order(list(_nodes(settings))):
        input_keys = {name: plan[source].key.key for name, source in node.inputs.items()}
        key = stage_key(
            stage=node.stage.name,
            version=node.stage.version,
            settings=key_settings(node.settings),
            inputs=input_keys | dict(node.models),
            data=dict(node.data),
            code=dict(node.code),
        )
        plan[node.node] = PlannedStage(node.node, node.stage, node.settings, node.inputs, key)
    return list(plan.values())


def _in_order(nodes: list[_Node]) -> list[_Node]:
    """Each after its inputs, and otherwise as they are given. The settings admit no circle."""
    placed: dict[str, _Node] = {}
    while len(placed) < len(nodes):
        ready = (node for node in nodes if node.node not in placed and placed.keys() >= set(node.inputs.values()))
        node = next(ready)
        placed[node.node] = node
    return list(placed.values())


def _nodes(settings: PipelineSettings) -> Iterator[_Node]:
    for kind in get_args(DatasetKind):
        source: DataSource | None = getattr(settings.data, kind)
        if source is not None:
            prepare = PrepareDataSettings(dataset=kind, source=source)
            prints = data_fingerprints(kind, source)
            yield _Node(f"data-{kind}", PREPARE_DATA, prepare, data=prints)
    if settings.sample is not None:
        inputs = settings.models_of("sample") | {"prompts": "data-prompts"}
        yield _Node("sample", SAMPLE, settings.sample, inputs, code=code_digests("sample", settings.sample))
    for name in SUPERVISED:
        if getattr(settings, name) is not None:
            yield _supervised(name, settings)
    if settings.ppo is not None:
        yield _Node("ppo", PPO, settings.ppo, _ppo_inputs(settings), code=code_digests("ppo", settings.ppo))
    if settings.evaluate is not None:
        policies = {name: name for name in settings.policies()}
        yield _Node("evaluate", EVALUATE, settings.evaluate, {**policies, "data": "data-eval"})


def _supervised(name: str, settings: PipelineSettings) -> _Node:
    """Starts from its own `model` where it has one, else from the SFT stage's artifact."""
    section: SupervisedSettings = getattr(settings, name)
    (kind,) = SECTION_DATA[name]
    models = foreign_models(name, section)
    return _Node(
        name,
        STAGES[name],
        pinned(section, models),
        inputs={"data": "sample" if name in settings.on_policy() else f"data-{kind}", **settings.models_of(name)},
        models=models,
        code=code_digests(name, section),
    )


def _ppo_inputs(settings: PipelineSettings) -> dict[str, str]:
    data = {"prompts": "data-prompts", "eval": "data-eval"}
    if settings.ppo is not None and settings.ppo.ptx is not None:
        data["ptx"] = "data-sft"
    return settings.models_of("ppo") | data
