"""The pages of the supervised stages are right: settings, metrics, examples, and OpenRLHF's options.

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
from rlhf_core.config.pipeline import PipelineSettings, load_pipeline
from rlhf_core.config.shapes import SHAPES
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


# -- OpenRLHF's options ---------------------------------------------------------------------------------------------

# Of OpenRLHF 0.11.2, as its parsers have them.
ALL_THREE = """
ckpt.output_dir ckpt.save_steps ckpt.save_hf ckpt.disable_ds ckpt.path ckpt.max_num ckpt.max_mem ckpt.load_enable
eval.steps eval.dataset eval.split
logger.logging_steps logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name
logger.tensorboard_dir
ds.use_universal_ckpt ds.deepcompile ds.zero_stage ds.param_dtype ds.zpg ds.adam_offload ds.attn_implementation
ds.experts_implementation ds.grad_accum_dtype ds.overlap_comm ds.tensor_parallel_size ds.ring_attn_size
ds.ring_attn_head_stride ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout
ds.packing_samples
train.micro_batch_size train.batch_size train.seed train.full_determinism_enable train.max_epochs
model.gradient_checkpointing_enable model.gradient_checkpointing_reentrant model.aux_loss_coef model.model_name_or_path
data.disable_fast_tokenizer data.dataloader_num_workers data.dataset data.dataset_probs data.dataset_split
data.max_samples data.input_template data.apply_chat_template data.tokenizer_chat_template data.max_len
adam.lr adam.betas adam.eps adam.weight_decay
muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov
local_rank optim lr_scheduler lr_warmup_ratio min_lr_ratio max_norm use_ms
"""
SFT_ONLY = "ds.use_liger_kernel model.pretrain_mode_enable data.multiturn data.input_key data.output_key"
PAIRS = "data.prompt_key data.chosen_key data.rejected_key"
RM_ONLY = "ds.value_head_prefix model.compute_fp32_loss_enable model.margin_loss_enable model.loss_type"
DPO_ONLY = """
ref.offload ds.use_liger_kernel model.beta model.ipo_enable model.label_smoothing model.nll_loss_coef
ref.model_name_or_path
"""
PRM = """
save_path save_steps save_hf_ckpt disable_ds_ckpt logging_steps eval_steps ckpt_path max_ckpt_num max_ckpt_mem
load_checkpoint use_ds_universal_ckpt max_norm gradient_checkpointing deepcompile seed full_determinism local_rank
zero_stage param_dtype zpg adam_offload attn_implementation use_liger_kernel grad_accum_dtype overlap_comm
gradient_checkpointing_use_reentrant disable_fast_tokenizer ds_tensor_parallel_size load_in_4bit lora_rank lora_alpha
lora_dropout target_modules pretrain max_epochs aux_loss_coef learning_rate lr_warmup_ratio lr_scheduler
micro_train_batch_size train_batch_size l2 adam_betas placeholder_token reward_tokens packing_samples dataset
dataset_probs eval_dataset dataset_split eval_split max_samples input_key label_key max_len use_wandb wandb_org
wandb_group wandb_project wandb_run_name use_tensorboard use_ms
"""
OPTIONS = {
    "SFT, RM and DPO": ALL_THREE.split(),
    "SFT alone": SFT_ONLY.split(),
    "RM alone": [*RM_ONLY.split(), *PAIRS.split()],
    "DPO alone": [*DPO_ONLY.split(), *PAIRS.split()],
    "PRM": PRM.split(),
}
LEFT_OUT = {
    "use_ms",
    "local_rank",
    "data.disable_fast_tokenizer",
    "disable_fast_tokenizer",
    "ds.ring_attn_size",
    "ds.ring_attn_head_stride",
}
# What is always so here, or follows from something else than a setting; the page says which.
WITHOUT_SETTING = {
    "ckpt.load_enable",
    "load_checkpoint",
    "ds.use_universal_ckpt",
    "use_ds_universal_ckpt",
    "data.dataloader_num_workers",
    "muon.ns_steps",
    "muon.nesterov",
    "muon.no_nesterov",
    "ds.value_head_prefix",
    "model.compute_fp32_loss_enable",
    "ref.offload",
}


def option_rows() -> list[tuple[str, str, str]]:
    """(section, option, what stands beside it)."""
    rows = []
    for section in re.split(r"^## ", page("openrlhf-options"), flags=re.MULTILINE)[1:]:
        title = section.split("\n", 1)[0].strip()
        rows += [(title, *row) for row in re.findall(r"^\| `--([\w.]+)` \| (.+) \|$", section, re.MULTILINE)]
    return rows


def settings_in(cell: str) -> list[str]:
    """Dotted settings that a cell names, with <stage> and <set> as every stage and data set."""
    named = re.findall(r"`((?:run|data|<stage>|sft|rm|prm|dpo|kto)(?:\.[\w<>]+)+)`", cell)
    paths = [path.replace("<stage>", stage) for path in named for stage in (STAGES if "<stage>" in path else [""])]
    return [path.replace("<set>", kind) for path in paths for kind in (SHAPES if "<set>" in path else [""])]


def is_setting(path: str) -> bool:
    """Whether a dotted path leads to a field of the pipeline's settings."""
    models: list[type[Settings]] = [PipelineSettings]
    for part in path.split("."):
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if not fields:
            return False
        models = [inner for field in fields for inner in settings_types(field.annotation)]
    return True


def test_every_option_of_openrlhf_has_a_row():
    found: dict[str, list[str]] = {}
    for section, option, _ in option_rows():
        found.setdefault(section, []).append(option)
    assert {section: sorted(options) for section, options in found.items()} == {
        section: sorted(options) for section, options in OPTIONS.items()
    }


def test_the_settings_of_its_rows_exist():
    wrong = [path for _, _, cell in option_rows() for path in settings_in(cell) if not is_setting(path)]
    assert not wrong
    assert is_setting("data.sft.sources.probability")
    assert not is_setting("sft.trainer.rank")
    assert settings_in("`<stage>.max_len`") == [f"{stage}.max_len" for stage in ("sft", "rm", "prm", "dpo", "kto")]
    assert settings_in("`data.<set>.split`, split")[::5] == ["data.sft.split", "data.eval.split"]


def test_what_has_no_setting_is_known():
    without = {option for _, option, cell in option_rows() if not settings_in(cell)}
    assert without - LEFT_OUT == WITHOUT_SETTING
    left_out = {option for _, option, cell in option_rows() if cell.startswith("left out")}
    assert left_out == LEFT_OUT


if __name__ == "__main__":
    for name in (*STAGES, "supervised"):
        (DOCS / f"{name}.md").write_text(with_tables(page(name)), encoding="utf-8")
