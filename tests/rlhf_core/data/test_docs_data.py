"""docs/data.md is right: its settings are valid, its rows have the shapes that it says, and no shape is missing."""

import json
import re

import pytest
import yaml

from rlhf_core.config.base import parse_settings
from rlhf_core.config.data import DataSettings, DataSource
from rlhf_core.config.shapes import SHAPES
from rlhf_core.data.loading import load_data

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(project):
    return (project / "docs" / "data.md").read_text()


def blocks(text, language):
    return [content for kind, content in FENCE.findall(text) if kind == language]


def test_its_settings_are_valid(page):
    examples = blocks(page, "yaml")
    assert len(examples) == 3
    for example in examples:
        parse_settings(DataSettings, yaml.safe_load(example), "data")


def test_its_rows_are_read_and_every_shape_has_one(page, tmp_path):
    shown = {}
    for section in re.split(r"^### ", page, flags=re.MULTILINE):
        kind = section.split("\n", 1)[0].strip()
        for number, line in enumerate("".join(blocks(section, "json")).splitlines()):
            path = tmp_path / f"{kind}{number}.jsonl"
            path.write_text(line)
            (source,) = load_data(kind, DataSource(path=str(path))).sources
            assert source.train.unused_columns == source.train.unused_keys == ()
            shown.setdefault(kind, set()).add(source.train.shape.split()[0])
    assert shown == {kind: {shape.name for shape in shapes} for kind, shapes in SHAPES.items() if kind != "eval"}


def test_each_shape_is_named_where_its_data_set_is_explained(page):
    sections = {section.split("\n", 1)[0].strip(): section for section in re.split(r"^### ", page, flags=re.MULTILINE)}
    for kind in ("sft", "pairs", "steps"):
        for shape in SHAPES[kind]:
            assert f"`{shape.name}`" in sections[kind]


def test_its_loader_loads(page, tmp_path):
    (loader,) = blocks(page, "python")
    solutions = [{"text": "3", "is_correct": True}, {"text": "4", "is_correct": False}]
    (tmp_path / "solutions-train.jsonl").write_text(json.dumps({"question": "1+2?", "solutions": solutions}))
    path = tmp_path / "loader.py"
    path.write_text(loader.replace("/data/", f"{tmp_path}/"))
    assert load_data("labelled", DataSource(path=str(path))).rows == [
        {"prompt": "1+2?", "response": "3", "label": True},
        {"prompt": "1+2?", "response": "4", "label": False},
    ]


def test_every_setting_of_a_source_is_explained(page):
    for name in DataSource.model_fields:
        assert re.search(rf"`{name}\b|\b{name}:", page), name
