"""The pages of the supervised stages are right: settings, metrics and examples.

The tables of settings are made from the models: `python -P tests/test_docs_stages.py` writes them into the pages anew.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from settings_tables import settings_table

from rlhf_core.config.base import Settings, settings_types
from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.config.supervised import (
    DpoSettings,
    KtoSettings,
    PrmSettings,
    RmSettings,
    SftSettings,
    SupervisedSettings,
    TextSettings,
)
from rlhf_core.config.training import LoraSettings, ModelSource, OptimizerSettings, ScratchModel, TrainerSettings
from rlhf_core.data.layout import Layout, make_batch
from rlhf_core.data.samples import Item, Sample
from rlhf_core.training.objective import Objective
from rlhf_core.training.objectives_aux import AuxLossObjective
from rlhf_core.training.objectives_preference import DpoObjective, KtoObjective
from rlhf_core.training.objectives_process import PrmObjective
from rlhf_core.training.objectives_reward import RmObjective
from rlhf_core.training.objectives_sft import SftObjective

DOCS = Path(__file__).resolve().parents[1] / "docs"
STAGES: dict[str, type[SupervisedSettings]] = {
    "sft": SftSettings,
    "rm": RmSettings,
    "prm": PrmSettings,
    "dpo": DpoSettings,
    "kto": KtoSettings,
}
SHARED = [
    SupervisedSettings,
    TextSettings,
    OptimizerSettings,
    LoraSettings,
    TrainerSettings,
    ModelSource,
    ScratchModel,
]
MODELS = {model.__name__: model for model in [*STAGES.values(), *SHARED]}
TABLE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


# -- tables of settings ---------------------------------------------------------------------------------------------


def own_fields(model: type[Settings]) -> list[str]:
    """The fields that a stage adds to those that all share, or declares otherwise."""
    shared = SupervisedSettings.model_fields if model in STAGES.values() else {}
    fields = model.model_fields
    return [name for name in fields if name not in shared or fields[name].description != shared[name].description]


def render_table(model: type[Settings]) -> str:
    return settings_table(model, own_fields(model))


def with_tables(text: str) -> str:
    return TABLE.sub(lambda found: f"{found[1]}{render_table(MODELS[found[2]])}{found[3]}", text)


@pytest.mark.parametrize("name", [*STAGES, "supervised"])
def test_tables_of_settings_are_those_of_the_models(name: str):
    text = page(name)
    assert text == with_tables(text), "settings have changed: run `python -P tests/test_docs_stages.py`"
    expected = [STAGES[name]] if name in STAGES else SHARED
    assert [found[2] for found in TABLE.finditer(text)] == [model.__name__ for model in expected]


def test_every_model_of_the_stages_has_a_table():
    found, left = set(), list[type[Settings]](STAGES.values())
    while left:
        model = left.pop()
        found.add(model)
        left += [inner for field in model.model_fields.values() for inner in settings_types(field.annotation)]
    assert found == set(MODELS.values()) - {SupervisedSettings}


def test_a_changed_default_or_description_changes_a_table():
    class Changed(Settings):
        beta: float = 0.2

    assert "| `beta` | `0.1` | Strength of the pull to the reference. |" in render_table(DpoSettings)
    assert "| `beta` | `0.2` | None |" in render_table(Changed)
    assert "those below" in render_table(SupervisedSettings)
    assert "One of `constant`, `cosine`, `linear`, `wsd`, `inverse_sqrt`." in render_table(OptimizerSettings)


# -- examples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*STAGES, "supervised"])
def test_examples_are_whole_pipelines(name: str, tmp_path: Path):
    examples = re.findall(r"^```yaml\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        path = tmp_path / "example.yaml"
        path.write_text(example, encoding="utf-8")
        settings = load_pipeline(path)
        assert name == "supervised" or getattr(settings, name) is not None


# -- metrics --------------------------------------------------------------------------------------------------------

COMMON = {"optimizer": {"lr": 1e-3}, "batch_size": 1, "max_len": 8, "epochs": 1}
LAYOUT = Layout(ranks=1, micro_batch_size=1, packing=False, capacity=8)


def sample(labels: list[float] | None = None) -> Sample:
    as_array = torch.tensor(labels).numpy() if labels else None
    return Sample(torch.tensor([1, 2, 3]).int().numpy(), torch.tensor([0.0, 1.0, 1.0]).numpy(), as_array)


CASES: dict[str, tuple[Callable[[], Objective], Item]] = {
    "sft": (SftObjective, Item((sample(),))),
    "rm": (lambda: RmObjective(RmSettings.model_validate(COMMON)), Item((sample(), sample()))),
    "prm": (
        lambda: PrmObjective(
            PrmSettings.model_validate({**COMMON, "placeholder_token": "*", "reward_tokens": ["+", "-"]})
        ),
        Item((sample([0.0, 0.0, 1.0]),)),
    ),
    "dpo": (
        lambda: DpoObjective(DpoSettings.model_validate({**COMMON, "nll_coef": 0.1})),
        Item((sample(), sample()), {"reference_chosen": 0.0, "reference_rejected": 0.0}),
    ),
    "kto": (
        lambda: KtoObjective(KtoSettings.model_validate(COMMON), samples_per_item=1),
        Item((sample(),), {"label": 1.0, "reference": 0.0}),
    ),
}


def metrics_of(name: str, *, aux: bool = False) -> set[str]:
    """Names of the objective's metrics, groups such as `step accuracy/1` as `step accuracy/<n>`."""
    make, item = CASES[name]
    batch = {**make_batch([item], [[0]], LAYOUT, 0), "kl": torch.tensor(0.0)}
    shape = batch["input_ids"].shape
    outputs: Any = torch.zeros((*shape, 2) if name == "prm" else shape)
    objective: Any = AuxLossObjective(make(), 0.1) if aux else make()
    parts = objective.loss(batch, (outputs, torch.tensor(1.0)) if aux else outputs)
    return {re.sub(r"/\d\+?$", "/<n>", metric) for metric in parts.metrics}


def logged(text: str) -> set[str]:
    """The names in the first column of the table below the heading `Logged`."""
    section = re.split(r"^## ", text.split("## Logged\n")[1], flags=re.MULTILINE)[0]
    first_cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("name", STAGES)
def test_the_metrics_of_a_stage_are_explained(name: str):
    assert logged(page(name)) == metrics_of(name)


def test_the_metrics_of_all_stages_are_explained():
    assert logged(page("supervised")) == {"loss", "grad_norm", "lr"} | (metrics_of("sft", aux=True) - metrics_of("sft"))


@pytest.mark.parametrize("name", STAGES)
def test_metrics_for_the_best_evaluation_are_named(name: str):
    (line,) = re.findall(r"^`best_metric` may be (.*?)\.$", page(name), re.MULTILINE)
    assert tuple(re.findall(r"`([^`]+)`", line)) == STAGES[name].metrics
    assert set(STAGES[name].metrics) <= {"loss", *metrics_of(name)}


if __name__ == "__main__":
    for name in (*STAGES, "supervised"):
        (DOCS / f"{name}.md").write_text(with_tables(page(name)), encoding="utf-8")
