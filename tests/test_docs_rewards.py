"""docs/rewards.md is right: its settings, its examples and its functions.

The tables of settings are made from the models: `python -P tests/test_docs_rewards.py` writes them into the page anew.
"""

import re
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent / "support"))

from settings_tables import settings_table

from rlhf_core.config import rewards
from rlhf_core.config.base import Settings, settings_types
from rlhf_core.config.rewards import RewardSettings
from rlhf_core.rollout.judge import fill_template
from rlhf_core.rollout.outcomes import Response, Scored
from rlhf_core.rollout.reward_functions import load_function

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rewards.md"
TABLE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        model: type[Settings] = getattr(rewards, found[2])
        return f"{found[1]}{settings_table(model, model.model_fields)}{found[3]}"

    return TABLE.sub(table, text)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_tables_of_settings_are_those_of_the_models() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "settings have changed: run `python -P tests/test_docs_rewards.py`"
    inner = [model for field in RewardSettings.model_fields.values() for model in settings_types(field.annotation)]
    assert [found[2] for found in TABLE.finditer(text)] == [model.__name__ for model in (RewardSettings, *inner)]


@pytest.mark.parametrize("example", blocks("yaml"))
def test_examples_are_settings(example: str) -> None:
    settings = RewardSettings.model_validate(yaml.safe_load(example)["ppo"]["reward"])
    if settings.judge is not None:
        asked = fill_template(settings.judge.template, Response("", "2+2?", "4", "four"))
        assert "Question: 2+2?\nReference: four\nAnswer: 4\n" in asked


def test_functions_of_the_page_run() -> None:
    plain, batched = (load_function("page.py", source, "reward_func") for source in blocks("python"))
    given = (["1+1= 2", "1+2= 4"], ["1+1=", "1+2="], ["2", "4"], ["2", "3"])
    assert plain(*given) == [Scored(1.0), Scored(0.0)]
    assert batched(*given) == [Scored(0.9, 1.0, {"query_length": 6.0}), Scored(-0.1, 0.0, {"query_length": 6.0})]


def test_every_source_is_explained() -> None:
    table = re.findall(
        r"^\| `(\w+)` \| .* \|$", PAGE.read_text(encoding="utf-8").split("## A function")[0], re.MULTILINE
    )
    others = {"prm_aggregate", "on_failure", "retries", "sandbox"}
    assert set(table) == set(RewardSettings.model_fields) - others


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
