"""docs/sample.md is right: its settings, its examples, its metrics.

The tables of settings are made from the models. To write them into the page anew:
`PYTHONPATH=tests/support python -P tests/test_docs_sample.py`.
"""

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import yaml
from settings_tables import settings_table

from rlhf_core.config import sampling
from rlhf_core.config.base import Settings, settings_types
from rlhf_core.config.data import DataSettings
from rlhf_core.config.pipeline import ON_POLICY
from rlhf_core.config.sampling import Form, PairForm, RejectionForm, SampleSettings, ScorerSettings, StepForm
from rlhf_core.rollout.drawings import Drawing
from rlhf_core.rollout.offline_scores import Scores
from rlhf_core.rollout.sample_rows import preference_pairs, rejection
from rlhf_core.rollout.step_labels import StepPlan, label_steps
from stages.sample_shown import sample_metrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sample.md"
TABLE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
OWN = [SampleSettings, RejectionForm, PairForm, StepForm, ScorerSettings]


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def with_tables(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        model: type[Settings] = getattr(sampling, found[2])
        return f"{found[1]}{settings_table(model, list(model.model_fields))}{found[3]}"

    return TABLE.sub(table, text)


def test_tables_of_settings_are_those_of_the_models() -> None:
    assert page() == with_tables(page()), "settings have changed: run this file as a script, see above"
    assert [found[2] for found in TABLE.finditer(page())] == [model.__name__ for model in OWN]
    inner = {model for field in SampleSettings.model_fields.values() for model in settings_types(field.annotation)}
    assert {model.__name__ for model in inner - set(OWN)} == {"RewardSettings", "SamplerSettings"}


def test_examples_are_settings() -> None:
    chain, files = (yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", page(), re.DOTALL))
    SampleSettings.model_validate({**chain["sample"], "sampler": {"max_model_len": 2048}})
    assert chain["rm"] == {"pairs": "on_policy"}
    DataSettings.model_validate(files["data"])


def test_every_form_and_every_reader_is_explained() -> None:
    forms = re.findall(r"^\| `(\w+)` \|", page().split("## Forms")[1].split("## Who")[0], re.MULTILINE)
    assert forms == ["form", *get_args(Form)]
    readers = re.findall(r"^\| `(\w+)\.(\w+): on_policy` \|", page(), re.MULTILINE)
    assert dict(readers) == ON_POLICY


def test_every_metric_is_explained() -> None:
    """Those of counts by the functions that count."""
    section = page().split("## Logged\n")[1]
    cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    settings = SampleSettings.model_validate(
        {"form": "pairs", "samples_per_prompt": 2, "max_new_tokens": 8, "max_prompt_len": 8, "reward": {"exact": 1}}
    )
    scores = Scores(["a", "b"], [1.0, None], [{"exact": 1.0}, {}], {"reward/failed": 1.0, "reward/dropped_groups": 1.0})
    drawings = [Drawing(np.zeros(3, np.int32), False), Drawing(np.zeros(5, np.int32), True)]
    counts = Counter(preference_pairs([], PairForm(), [0]).counts)
    counts.update(rejection([], RejectionForm()).counts)
    counts.update(label_steps(StepPlan([], [], [], []), [], [], StepForm()).counts)
    logged = {name.replace("/exact", "/<source>") for name in sample_metrics(settings, [0], drawings, scores, counts)}
    by_the_stage = {
        "prompts_dropped_too_long",
        "rows",
        "eval_rows",
        "prompts_without_rows",
        "samples_without_new_steps",
    }
    by_the_stage |= {"completions", "completions_truncated", "completions_failed"}
    assert named == logged | by_the_stage | {"reward/<source>/failed/<reason>"}


if __name__ == "__main__":
    PAGE.write_text(with_tables(page()), encoding="utf-8")
