"""The section sample of a pipeline: what it admits, and who may read what it makes."""

from pathlib import Path

import pytest

from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import PipelineSettings, load_pipeline

STAGE = "optimizer: {lr: 1e-3}, batch_size: 8, max_len: 48, max_steps: 2"
PRM = f"prm={{{STAGE}, placeholder_token: a, reward_tokens: [b, c], steps: on_policy}}"
DPO = f"dpo={{{STAGE}}}"


def sampled(form: str = "pairs", **others: str) -> str:
    given = {
        "form": form,
        "samples_per_prompt": "4",
        "max_new_tokens": "24",
        "max_prompt_len": "24",
        "reward": "{exact: 1}",
        "eval_share": "0.1",
        "sampler": "{max_model_len: 64}",
        **others,
    }
    return f"sample={{{', '.join(f'{name}: {value}' for name, value in given.items())}}}"


def load(project: Path, *overrides: str) -> PipelineSettings:
    return load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [sampled(max_new_tokens="60")],
            "sample: max_prompt_len 24 + max_new_tokens 60 = 84 tokens do not fit",
        ),
        ([sampled(samples_per_prompt="1")], "sample: form pairs compares the samples of a prompt, and samples_per_pro"),
        ([sampled(temperature="0")], "sample: temperature 0 makes all 4 of samples_per_prompt the same; give a higher"),
        ([sampled(temperature="0.001")], "sample: temperature 0.001 is below 0.01, the least that vLLM samples at"),
        (
            [sampled("steps", samples_per_prompt="1", temperature="0")],
            "sample: temperature 0 makes all 8 of steps.completions the same; give a higher one, or steps",
        ),
        ([sampled("rejection", pairs="{which: all}")], "sample: `pairs` goes with form pairs, and form is rejection"),
        ([sampled(rejection="{threshold: 2}")], "sample: `rejection` goes with form rejection, and form is pairs"),
        ([sampled(pairs="{max_per_prompt: 2}")], "sample: pairs.max_per_prompt goes with which all; best_worst makes"),
        ([sampled(policy="kto")], "sample.policy is kto, and there is no section kto; add it, or change that"),
        ([sampled(reward="{prm: 1}")], "sample.reward.prm is 1.0, and there is no section prm; add it, or change that"),
        (["rm.pairs=on_policy"], "rm.pairs is on_policy, and there is no section sample; add one of form pairs, or"),
        (
            [sampled("steps"), "rm.pairs=on_policy"],
            "rm.pairs is on_policy, and sample.form is steps; set that",
        ),
        (
            [sampled(eval_share="null"), "rm.pairs=on_policy"],
            "rm.pairs is on_policy, and rm needs held-out pairs, on which the reward model's accuracy and",
        ),
        (
            [sampled(reward="{rm: 1}"), "rm.pairs=on_policy"],
            "rm.pairs is on_policy, and sample itself needs rm (sample.reward.rm is 1.0); one of the two has to do",
        ),
        (
            [sampled(policy="ppo"), "rm.pairs=on_policy"],
            "rm.pairs is on_policy, and sample itself needs ppo (sample.policy is ppo); one of the two has to do",
        ),
        (
            [sampled(policy="dpo"), f"{DPO[:-1]}, pairs: on_policy}}"],
            "dpo.pairs is on_policy, and sample itself needs dpo (sample.policy is dpo); one of the two has to do",
        ),
        (
            [sampled("steps", steps="{labels: soft}"), PRM],
            "prm.labels is 'hard' and sample.steps.labels 'soft'; prm",
        ),
        (
            [sampled("steps", steps='{separator: ","}'), PRM],
            "prm.separator is '\\n' and sample.steps.separator ','",
        ),
        (
            [sampled(), "data.prompts=null", "ppo=null"],
            "sample needs data.prompts; give it a path, or leave",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_one_line(project: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(project, *overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_sections_that_read_samples_need_no_data_set_of_their_own(project: Path) -> None:
    settings = load(project, sampled(), "rm.pairs=on_policy", f"{DPO[:-1]}, pairs: on_policy}}", "data.pairs=null")
    assert settings.on_policy() == ["rm", "dpo"]
    assert load(project, sampled()).on_policy() == []


@pytest.mark.parametrize(
    ("form", "kind"),
    [("generations", "sft"), ("best_of_n", "sft"), ("rejection", "sft"), ("pairs", "pairs"), ("steps", "steps")],
)
def test_each_form_makes_rows_of_a_data_set(project: Path, form: str, kind: str) -> None:
    settings = load(project, sampled(form)).sample
    assert settings is not None
    assert settings.kind == kind
