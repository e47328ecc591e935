"""What supervised settings refuse and derive."""

from typing import Any

import pytest

from rlhf_core.config.base import SettingsError, key_settings, parse_settings
from rlhf_core.config.supervised import KtoSettings, RmSettings, TextSettings

COMMON: dict[str, Any] = {"optimizer": {"lr": 1e-3}, "batch_size": 8, "max_len": 8, "max_steps": 1}


@pytest.mark.parametrize(
    ("given", "better"),
    [
        ({"best_metric": "loss"}, "lower"),
        ({"best_metric": "accuracy"}, "higher"),
        ({"best_metric": "margin"}, "higher"),
        ({"best_metric": "loss", "best_is": "higher"}, "higher"),
    ],
)
def test_which_value_of_a_metric_is_better(given: dict[str, Any], better: str):
    assert parse_settings(RmSettings, COMMON | given).better == better


def test_a_smaller_kl_is_better():
    assert parse_settings(KtoSettings, COMMON | {"best_metric": "kl"}).better == "lower"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"best_metric": "acuracy"}, "best_metric 'acuracy' is none of loss, accuracy, margin"),
        ({"best_is": "higher"}, "give best_metric too"),
        ({"use_margin": True, "loss": "log_exp"}, "loss log_exp has no margin"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        parse_settings(RmSettings, COMMON | given)


def test_only_plain_text_is_split():
    assert parse_settings(TextSettings, {"format": "text", "truncation": "split"}).truncation == "split"
    with pytest.raises(
        SettingsError, match="truncation split goes with format text; with format chat give drop or cut"
    ):
        parse_settings(TextSettings, {"truncation": "split"})


def test_the_dtype_in_which_gradients_add_up_is_in_the_key():
    plain, low = (
        key_settings(parse_settings(RmSettings, COMMON | {"trainer": trainer}))
        for trainer in ({}, {"grad_accum_dtype": "bfloat16"})
    )
    assert plain != low
