"""Presets of algorithms, and combinations that are refused in one line."""

import typing

import pytest

from rlhf_core.config.algorithm import PRESETS, AlgorithmSettings, KlSettings, Preset
from rlhf_core.config.base import SettingsError, key_settings, parse_settings
from rlhf_core.config.rl import PpoSettings

OPTIMIZER = {"lr": 1e-6}
BASE = {
    "optimizer": OPTIMIZER,
    "rollout": {"prompts": 8, "samples_per_prompt": 4, "max_new_tokens": 16, "max_prompt_len": 16},
    "reward": {"exact": 1.0},
    "steps": 4,
    "batch_size": 16,
}


def ppo(**given: object) -> PpoSettings:
    return parse_settings(PpoSettings, {**BASE, **given})


def test_every_name_is_a_preset_and_valid():
    assert set(typing.get_args(Preset)) == set(PRESETS)
    for preset in PRESETS:
        critic = {"critic": {"optimizer": OPTIMIZER}} if preset == "ppo" else {}
        assert ppo(algorithm={"preset": preset}, **critic).algorithm.preset == preset


# What the papers say, by hand: estimator, advantages' normalisation, loss, aggregation, KL (weight, estimator, place).
PAPERS = {
    "ppo": ("gae", "mean_std", "clip", "token_mean", (0.05, "k1", "reward")),
    "reinforce_pp": ("reinforce", "mean_std", "clip", "token_mean", (0.01, "k1", "reward")),
    "reinforce_pp_baseline": ("reinforce_baseline", "mean_std", "clip", "token_mean", (0.001, "k2", "loss")),
    "rloo": ("rloo", "none", "clip", "token_mean", (0.05, "k1", "reward")),
    "grpo": ("group_norm", "none", "clip", "sequence_mean", (0.04, "k3", "loss")),
    "dr_grpo": ("dr_grpo", "none", "clip", "constant", (0.0, "k1", "reward")),
    "dapo": ("group_norm", "none", "clip", "token_mean", (0.0, "k1", "reward")),
    "gspo": ("group_norm", "none", "gspo", "sequence_mean", (0.0, "k1", "reward")),
    "cispo": ("group_norm", "none", "cispo", "token_mean", (0.0, "k1", "reward")),
}


@pytest.mark.parametrize("preset", PAPERS)
def test_presets_fill_visible_fields(preset):
    a = AlgorithmSettings(preset=preset)
    assert (a.estimator, a.normalise, a.loss, a.aggregation) == PAPERS[preset][:4]
    assert (a.kl.coef, a.kl.estimator, a.kl.place) == PAPERS[preset][4]


def test_bounds_of_dapo_gspo_and_cispo():
    dapo, gspo, cispo = (AlgorithmSettings(preset=name) for name in ("dapo", "gspo", "cispo"))
    assert (dapo.clip_low, dapo.clip_high, dapo.dynamic_sampling.enabled) == (0.2, 0.28, True)
    assert dapo.shaping.overlong_share == 0.2
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert (cispo.clip_low, 1 + cispo.clip_high) == (1.0, 5.0)


def test_what_is_given_overrides_the_preset_field_by_field():
    a = AlgorithmSettings.model_validate({"preset": "grpo", "clip_high": 0.3, "kl": {"coef": 0.5}})
    assert (a.clip_high, a.kl.coef, a.kl.estimator, a.estimator) == (0.3, 0.5, "k3", "group_norm")
    assert AlgorithmSettings(preset="grpo", kl=KlSettings(coef=0.5)).kl == a.kl


def test_settings_that_were_written_out_stay_as_they_are():
    a = AlgorithmSettings.model_validate({"preset": "grpo", "kl": {"coef": 0.5}})
    assert AlgorithmSettings.model_validate(a.model_dump()) == a
    assert AlgorithmSettings.model_validate_json(a.model_dump_json()) == a


def test_the_presets_name_is_in_no_key_and_what_it_fills_is():
    named = AlgorithmSettings(preset="dr_grpo")
    spelt = AlgorithmSettings(estimator="dr_grpo", normalise="none", aggregation="constant", kl=KlSettings(coef=0.0))
    assert key_settings(named) == key_settings(spelt) != key_settings(AlgorithmSettings())
    assert key_settings(AlgorithmSettings(preset="ppo")) == {}


CRITIC = {"critic": {"optimizer": OPTIMIZER}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "algorithm.estimator gae needs a critic; give critic.optimizer, or another estimator"),
        ({"algorithm": {"preset": "grpo"}, **CRITIC}, "algorithm.estimator group_norm has no use for a critic; leave"),
        (
            {"algorithm": {"preset": "rloo"}, "rollout": {**BASE["rollout"], "samples_per_prompt": 1, "prompts": 16}},
            "algorithm.estimator rloo compares the responses of a group, and rollout.samples_per_prompt is 1; give 2",
        ),
        (
            {
                "algorithm": {"dynamic_sampling": {"enabled": True}},
                "rollout": {**BASE["rollout"], "samples_per_prompt": 1, "prompts": 16},
                **CRITIC,
            },
            "algorithm.dynamic_sampling compares the responses of a group",
        ),
        ({"rollout": {**BASE["rollout"], "top_p": 0.9}, **CRITIC}, "rollout: top_p 0.9 samples from a part of the"),
        ({"batch_size": 12, **CRITIC}, "= 32 trajectories, which is not a multiple of batch_size 12"),
        ({"algorithm": {"preset": "grop"}, **CRITIC}, "algorithm.preset: Input should be 'ppo', 'reinforce_pp', "),
        (
            {"algorithm": {"preset": "grpo", "bootstrap_truncated": True}},
            "algorithm: bootstrap_truncated needs a critic, which estimator group_norm has not; use gae",
        ),
        ({"algorithm": {"preset": "cispo", "dual_clip": 9}}, "algorithm: dual_clip bounds the ratio of loss clip and"),
        ({"algorithm": {"dual_clip": 1.1}, **CRITIC}, "algorithm: dual_clip 1.1 must be above 1 + clip_high = 1.2"),
        (
            {"algorithm": {"kl": {"place": "loss"}}, **CRITIC},
            "algorithm.kl: estimator k1 in the loss has a gradient of mean 0, so it would hold nothing; use k2, or k3",
        ),
        ({"algorithm": {"kl": {"unbiased_gradient": True}}, **CRITIC}, "algorithm.kl: unbiased_gradient is for place"),
        ({"algorithm": {"kl": {"coef": 0, "target": 1}}, **CRITIC}, "algorithm.kl: coef 0 holds no reference, so"),
        ({"algorithm": {"mismatch": {"low": 2, "high": 1}}, **CRITIC}, "algorithm.mismatch: low 2 is not below high 1"),
        (
            {"algorithm": {"mismatch": {"mode": "clip", "statistic": "tv"}}, **CRITIC},
            "algorithm.mismatch: mode clip clips the ratio, not tv; use statistic ratio, or mode mask",
        ),
        ({"algorithm": {"shaping": {"clip": [1, -1]}}, **CRITIC}, "algorithm.shaping: clip [1.0, -1.0]: the first is"),
        (
            {"lora": {"rank": 2}, "algorithm": {"kl": {"refresh_steps": 3}}, **CRITIC},
            "algorithm.kl.refresh_steps 3 makes the policy its reference, and with lora that is the policy without its",
        ),
        (
            {
                "trainer": {"ranks": 2, "tensor_parallel": 2, "zero_stage": 3},
                "algorithm": {"kl": {"refresh_steps": 3}},
                **CRITIC,
            },
            "algorithm.kl.refresh_steps 3 with trainer.tensor_parallel 2 and zero_stage 3: DeepSpeed divides the",
        ),
        (
            {"lora": {"rank": 2, "dropout": 0.1}, **CRITIC},
            "lora.dropout 0.1: RL compares log-probs before and after an update, and dropout would make their ratios "
            "noise; set it to 0",
        ),
        (
            {"critic": {"optimizer": {"lr": 1e-5}, "lora": {"rank": 2, "dropout": 0.1}}},
            "critic.lora.dropout 0.1: RL compares log-probs",
        ),
        (
            {"lora": {"rank": 2, "load_in_4bit": True}, **CRITIC},
            "lora.load_in_4bit is for supervised stages: RL hands whole weights to its sampler after each step; set it",
        ),
        (
            {"critic": {"optimizer": OPTIMIZER, "lora": {"rank": 2}}, "trainer": {"ranks": 2, "tensor_parallel": 2}},
            "critic.lora with trainer.tensor_parallel 2: DeepSpeed would divide adapters as well; use",
        ),
        ({"best_metric": "pass@4", **CRITIC}, "best_metric 'pass@4' is none of exact_match"),
        ({"best_metric": "truncated_greedy/aime", **CRITIC}, "best_metric 'truncated_greedy/aime' is none of exact_"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(given, message):
    with pytest.raises(SettingsError) as caught:
        ppo(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapters_go_with_a_reference_that_stands_still_and_with_none():
    assert ppo(lora={"rank": 2}, **CRITIC).algorithm.kl.coef > 0
    assert ppo(lora={"rank": 2}, algorithm={"kl": {"coef": 0.0}}, **CRITIC).algorithm.kl.coef == 0


@pytest.mark.parametrize(("given", "rows"), [({}, 16), ({"batch_size": 5}, 5)])
def test_ptx_takes_as_many_rows_as_trajectories_or_as_told(given, rows):
    assert ppo(ptx={"coef": 0.5, "max_len": 8, **given}, **CRITIC).ptx_rows == rows
    assert ppo(**CRITIC).ptx_rows == 0


def test_metrics_of_an_evaluation():
    settings = ppo(evaluation={"samples_per_prompt": 6}, best_metric="pass@4", **CRITIC)
    assert settings.evaluation.metrics == (
        "exact_match", "mean@6", "majority@6", "pass@1", "pass@2", "pass@4", "pass@6"
    )  # fmt: skip
    by_source = ppo(evaluation={"verifier": "math"}, best_metric="math_match/gsm8k", **CRITIC)
    assert by_source.evaluation.metrics == ("exact_match", "math_match")
