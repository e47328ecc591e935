import pytest

from rlhf_core.config.base import SettingsError, key_settings, parse_settings
from rlhf_core.config.data import DataSettings, DataSource

TWO = [{"path": "a.jsonl", "probability": 0.25}, {"hub": "org/name", "probability": 0.75}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "data.sft: give exactly one of `path`, `hub` and `arithmetic` (or `sources`)"),
        ({"path": "a", "hub": "b/c"}, "data.sft: give exactly one of `path`, `hub` and `arithmetic`"),
        ({"sources": [{}]}, "data.sft.sources.0: give exactly one of `path`, `hub` and `arithmetic`"),
        ({"sources": [{"pth": "a"}]}, "data.sft.sources.0.pth: unknown setting; did you mean 'path'?"),
        ({"sources": TWO, "path": "a", "split": "x"}, "`path`, `split` cannot stand beside `sources`; give it to one"),
        ({"sources": [TWO[0], {"path": "b"}]}, "give every one of `sources` a `probability`, or none of them"),
        ({"sources": [TWO[0], TWO[0]]}, "the probabilities of `sources` sum to 0.5; they must sum to 1"),
        ({"path": "a", "probability": 0.5}, "data.sft.probability: unknown setting"),
        ({"arithmetic": {"rows": 3}, "max_samples": 2, "split": "x"}, "`split`, `max_samples` belongs to `path` and `"),
        ({"path": "a", "revision": "main"}, "`revision` and `subset` belong to `hub`"),
        ({"path": "a", "eval_path": "b", "eval_share": 0.1}, "give one of `eval_share`, `eval_path` and `eval_hub`"),
        ({"path": "a", "eval_split": "b", "eval_share": 0.1}, "give one of `eval_share`, `eval_path` and `eval_hub`"),
        ({"path": "a", "eval_path": "b", "eval_hub": "c/d"}, "`eval_hub`, the last two with or without `eval_split`: "),
        ({"path": "a", "eval_hub": "c/d", "eval_share": 0.1}, "give one of `eval_share`, `eval_path` and `eval_hub`"),
        ({"hub": "b/c", "eval_subset": "d"}, "`eval_revision` and `eval_subset` belong to `eval_hub`"),
        ({"path": "a", "eval_path": "b", "eval_revision": "d"}, "`eval_revision` and `eval_subset` belong to `eval_h"),
        ({"hub": "b/c", "eval_hub": "b/c"}, "`split` and `eval_split` both mean train of b/c; give two splits or fil"),
        ({"arithmetic": {"rows": 3}, "eval_hub": "b/c"}, "`eval_hub` belongs to `path` and `hub`; use `rows` and `ev"),
        ({"path": "a", "split": "x", "eval_split": "x"}, "the held-out rows are the training rows: `split` and `eval_"),
        ({"path": "a", "eval_split": "train"}, "`split` and `eval_split` both mean train of a; give two splits"),
        ({"hub": "b/c", "eval_split": "train"}, "`split` and `eval_split` both mean train of b/c; give two splits or"),
        ({"path": "a", "eval_path": "a"}, "`split` and `eval_split` both mean train of a; give two splits"),
        ({"path": "a", "split": "x", "eval_path": "a", "eval_split": "x"}, "both mean x of a; give two splits"),
        ({"sources": [{"path": "a", "split": "train", "eval_path": "a"}]}, "data.sft.sources.0: the held-out rows are"),
        ({"path": "a", "eval_share": 1.0}, "data.sft.eval_share: Input should be less than 1"),
        ({"path": "a", "shape": "markers"}, "sft.shape is markers; this data set has prompt, alpaca, messages, text"),
        ({"path": "a", "columns": {"chosen": "x"}}, "sft.columns maps chosen; this data set has prompt, response, sys"),
        (
            {"path": "a", "shape": "text", "columns": {"prompt": "x"}},
            "sft.columns maps prompt; this data set has text",
        ),
        ({"sources": [{"path": "a", "columns": {"x": "y"}}]}, "sft.sources.0.columns maps x; this data set has"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_one_line(source, message):
    with pytest.raises(SettingsError) as caught:
        parse_settings(DataSettings, {"sft": source}, "data")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pairs",
    [
        {"path": "a", "eval_path": "b"},
        {"path": "a", "eval_split": "test"},
        {"path": "a", "split": "x", "eval_path": "b", "eval_split": "x"},
        {"path": "a", "split": "x", "eval_path": "a"},
        {"hub": "a/b", "eval_path": "c"},
        {"hub": "a/b", "eval_hub": "c/d"},
        {"path": "a", "eval_hub": "c/d", "eval_revision": "v1", "eval_subset": "e", "eval_split": "test"},
        {"hub": "a/b", "eval_hub": "a/b", "eval_split": "test"},
        {"hub": "a/b", "eval_hub": "a/b", "eval_subset": "c"},
        {"path": "a", "eval_share": 0.1},
        {"arithmetic": {"rows": 3, "eval_rows": 1}},
        {"sources": [{"path": "a"}, {"path": "b", "eval_share": 0.1}]},
    ],
)
def test_held_out_rows_may_come_from_any_of(pairs):
    assert any(part.has_held_out for part in parse_settings(DataSource, pairs).parts)


@pytest.mark.parametrize("pairs", [{"path": "a"}, {"sources": [{"path": "a"}]}])
def test_there_may_be_none(pairs):
    assert not any(part.has_held_out for part in parse_settings(DataSource, pairs).parts)


@pytest.mark.parametrize(
    "source", [{"path": "a"}, {"arithmetic": {"rows": 3}}, {"sources": TWO, "max_samples": 5, "seed": 1}]
)
def test_settings_come_back_from_json_as_they_were(source):
    settings = parse_settings(DataSource, source)
    assert parse_settings(DataSource, settings.model_dump(mode="json")) == settings


def test_what_is_fingerprinted_is_not_in_the_key_by_its_name():
    source = {"path": "a", "eval_path": "b"}
    assert key_settings(parse_settings(DataSource, source)) == {}
    source = {"path": "a", "eval_hub": "b/c", "eval_revision": "v1", "eval_subset": "d"}
    assert key_settings(parse_settings(DataSource, source)) == {"eval_hub": "b/c", "eval_subset": "d"}
    moved = [{**TWO[0], "path": "elsewhere.jsonl"}, {**TWO[1], "revision": "v2"}]
    keys = [key_settings(parse_settings(DataSource, {"sources": sources})) for sources in (TWO, moved)]
    assert keys[0] == keys[1] == {"sources": [{"probability": 0.25}, {"probability": 0.75, "hub": "org/name"}]}
    assert key_settings(parse_settings(DataSource, {"path": "a", "on_bad_row": "drop"})) == {"on_bad_row": "drop"}
