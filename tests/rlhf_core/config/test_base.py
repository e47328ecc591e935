from typing import Annotated

import pytest
from pydantic import Field

from rlhf_core.config.base import Neutral, Settings, SettingsError, field_table, key_settings, parse_settings


class Inner(Settings):
    lr: float = Field(1e-3, gt=0)
    path: Annotated[str, Neutral] = "here"


class Outer(Settings):
    inner: Inner = Field(default_factory=Inner)
    maybe: Inner | None = None
    rows: int
    ranks: Annotated[int, Neutral] = 1


def test_key_settings_leave_out_defaults_and_neutral_fields():
    assert key_settings(Outer(rows=3)) == {"rows": 3}
    assert key_settings(Outer(rows=3, ranks=8, inner=Inner(path="there"))) == {"rows": 3}
    assert key_settings(Outer(rows=3, inner=Inner(lr=0.5))) == {"rows": 3, "inner": {"lr": 0.5}}


def test_a_part_that_is_there_differs_from_one_that_is_not():
    assert key_settings(Outer(rows=3, maybe=Inner())) == {"rows": 3, "maybe": {}}


def test_a_number_has_one_key_however_it_is_written():
    assert key_settings(Outer(rows=3, inner=Inner(lr=1))) == key_settings(Outer(rows=3, inner=Inner(lr=1.0)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": 1, "inner": {"lrr": 2}}, "sft.inner.lrr: unknown setting; did you mean 'lr'?"),
        ({"rows": 1, "quux": 2}, "sft.quux: unknown setting; allowed here: inner, maybe, ranks, rows"),
        ({}, "sft.rows: missing, and it has no default; give it in the pipeline file or as set: sft.rows=VALUE"),
        ({"rows": 1, "inner": {"lr": -1}}, "sft.inner.lr: Input should be greater than 0 (given -1)"),
        ({"rows": 1, "inner": {"lr": float("nan")}}, "sft.inner.lr: Input should be a finite number (given nan)"),
    ],
)
def test_faults_are_one_line_with_the_nearest_name(values, message):
    with pytest.raises(SettingsError) as caught:
        parse_settings(Outer, values, "sft")
    assert str(caught.value) == message


def test_several_faults_stand_in_one_line():
    with pytest.raises(SettingsError) as caught:
        parse_settings(Outer, {"row": 1}, "sft")
    assert "did you mean 'rows'?" in str(caught.value)
    assert "sft.rows: missing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_field_table_reaches_nested_models_and_marks_neutral_fields():
    assert field_table(Outer) == [
        ("inner.lr", "0.001", False),
        ("inner.path", "'here'", True),
        ("maybe", "None", False),
        ("maybe.lr", "0.001", False),
        ("maybe.path", "'here'", True),
        ("rows", "required", False),
        ("ranks", "1", True),
    ]
