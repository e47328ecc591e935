"""The page of RL is right: settings, presets and example.

The tables of settings are made from the models. To write them into the page anew:
`PYTHONPATH=tests/support python -P tests/test_docs_rl.py`.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from settings_tables import settings_table

from rlhf_core.config.algorithm import PRESETS, AlgorithmSettings
from rlhf_core.config.base import Settings, settings_types
from rlhf_core.config.rl import CriticSettings, EvaluationSettings, PpoSettings, PtxSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rl.md"
TABLE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def models() -> dict[str, type[Settings]]:
    inner = [m for field in AlgorithmSettings.model_fields.values() for m in settings_types(field.annotation)]
    others = [PtxSettings, CriticSettings, EvaluationSettings]
    return {model.__name__: model for model in [*others, AlgorithmSettings, *inner]}


def with_tables(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        model = models()[found[2]]
        return f"{found[1]}{settings_table(model, list(model.model_fields))}{found[3]}"

    return TABLE.sub(table, text)


def test_tables_of_settings_are_those_of_the_models():
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "settings have changed: run this file as a script, see above"
    assert {found[2] for found in TABLE.finditer(text)} == set(models())


def test_the_example_is_valid():
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    given: dict[str, Any] = yaml.safe_load(example)["ppo"]
    settings = PpoSettings.model_validate({**given, "sampler": {"max_model_len": 2048}})
    assert (settings.algorithm.kl.coef, settings.algorithm.kl.estimator) == (0.01, "k3")


def test_every_preset_is_described_as_it_is():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    described = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows if name in PRESETS}
    assert set(described) == set(PRESETS)
    normalised = {"mean_std": "mean, std", "none": ""}
    for name, (estimator, over, loss, aggregation, kl, _) in described.items():
        a = AlgorithmSettings.model_validate({"preset": name})
        assert estimator.split(",")[0] == a.estimator
        assert over == normalised[a.normalise]
        assert loss.split(" ")[0].rstrip(",") == a.loss
        assert aggregation == a.aggregation
        expected = f"{a.kl.coef:g} {a.kl.estimator} in the {a.kl.place}" if a.kl.coef else "none"
        assert kl == expected


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
