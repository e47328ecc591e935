import subprocess
import sys

import pytest

from rlhf_core.config.base import SettingsError, key_settings
from rlhf_core.config.pipeline import SECTION_DATA, apply_overrides, load_pipeline
from rlhf_core.config.training import TrainerSettings


@pytest.fixture(scope="module")
def demo(project):
    return project / "deployments" / "pipelines" / "demo.yaml"


def test_every_shipped_pipeline_is_valid_and_has_the_sections_of_its_name(project):
    pipelines = {path.stem: load_pipeline(path) for path in (project / "deployments" / "pipelines").glob("*.yaml")}
    sections = {stem: {name for name in SECTION_DATA if getattr(one, name)} for stem, one in pipelines.items()}
    assert sections == {
        "demo": {"sft", "rm", "ppo", "evaluate"},
        "demo-prm": {"sft", "prm", "ppo", "evaluate"},
        "demo-dpo": {"sft", "dpo", "evaluate"},
        "demo-kto": {"sft", "kto", "evaluate"},
        "demo-on-policy": {"sft", "sample", "rm", "ppo", "evaluate"},
        "llama3-8b": {"sft", "rm", "ppo", "evaluate"},
    }
    assert pipelines["llama3-8b"].ppo.trainer.zero_stage == 3


def test_overrides_are_yaml_values_at_dotted_names(demo):
    settings = load_pipeline(demo, ["ppo.optimizer.lr=1e-6", "sft.model.scratch.layers=1", "ppo.reward={rm: 2.0}"])
    assert settings.ppo.optimizer.lr == 1e-6
    assert settings.sft.model.scratch is not None
    assert settings.sft.model.scratch.layers == 1
    assert (settings.ppo.reward.rm, settings.ppo.reward.exact) == (2.0, 0.0)


def test_overrides_leave_their_source_alone():
    source = {"sft": {"seed": 1}}
    assert apply_overrides(source, ["sft.seed=2", "run.store=/s"]) == {"sft": {"seed": 2}, "run": {"store": "/s"}}
    assert source == {"sft": {"seed": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.sed=1", "sft.sed: unknown setting; did you mean 'seed'?"),
        ("sft.max_len=65", "sft: max_len 65 is above model.scratch.max_position 64; lower it or give"),
        ("sft.seed", "set: 'sft.seed' is not of the form stage.setting=VALUE, e.g. ppo.optimizer.lr=1e-6"),
        ("sft..seed=1", "set: 'sft..seed=1' is not of the form stage.setting=VALUE, e.g. ppo.optimizer.lr=1e-6"),
        ("sft.seed.x=1", "set: 'sft.seed.x=1' goes below 'seed', which holds a value and no settings"),
        ("sft.seed={", "set: the value of 'sft.seed={' is not YAML"),
        (
            "ppo.batch_size=50",
            "a rollout has prompts 16 x samples_per_prompt 4 = 64 trajectories, "
            "which is not a multiple of batch_size 50",
        ),
        ("ppo.rollout.max_new_tokens=4000", "do not fit sampler.max_model_len"),
        ("sft.epochs=1", "sft: give exactly one of `epochs` and `max_steps`"),
        (
            "sft={model: {path: m}, optimizer: {lr: 1}, batch_size: 1, max_len: 8, epochs: 1, best_metric: loss, "
            "trainer: {save_steps: null}}",
            "sft: best_metric loss keeps the best weights in a training checkpoint, and trainer.save_steps is null",
        ),
        ("sft.model.hub=org/name", "sft.model: give exactly one of `path`, `hub` and `scratch`"),
        ("sft.model={path: m, revision: main}", "sft.model: `revision` belongs to `hub`"),
        ("data.sft.path=x.jsonl", "data.sft: give exactly one of `path`, `hub` and `arithmetic`"),
        ("ppo.reward={rm: 0, exact: 0}", "every weight is 0, so nothing would be rewarded"),
        ("ppo.critic.warmup_steps=120", "critic.warmup_steps 120 leave none of 120 steps to train the policy"),
        ("data.pairs.arithmetic.eval_rows=0", "rm needs held-out rows of data.pairs, on which"),
        ("data.pairs.arithmetic.eval_rows=0", "give data.pairs.arithmetic.eval_rows"),
        ("data.pairs={path: x.jsonl}", "give data.pairs.eval_path"),
        ("sft.model.scratch.heads=3", "hidden_size 128 must be a multiple of 2 x heads 3"),
    ],
)
def test_bad_settings_are_one_line_that_says_what_to_do(demo, override, message):
    given = ["sft.seed=0", "ppo.rollout={prompts: 16, samples_per_prompt: 4, max_new_tokens: 8, max_prompt_len: 8}"]
    with pytest.raises(SettingsError) as caught:
        load_pipeline(demo, [*given, "ppo.batch_size=64", "ppo.steps=120", override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("save_steps", "saved"), [(3, [3, 6, 7]), (7, [7]), (None, [])])
def test_training_checkpoints_are_made_as_often_as_told_and_after_the_last_step(save_steps, saved):
    trainer = TrainerSettings(save_steps=save_steps)
    assert [step for step in range(1, 8) if trainer.saves_at(step, 7)] == saved


STAGE = "optimizer: {lr: 1e-3}, batch_size: 8, max_len: 48, max_steps: 2"
PRM = f"prm={{{STAGE}, placeholder_token: a, reward_tokens: [b, c]}}"
DPO = f"dpo={{{STAGE}}}"
KTO = f"kto={{{STAGE}}}"
PTX = ["ppo.reward={exact: 1}", "ppo.ptx={coef: 0.5, max_len: 16}"]
LABELLED = "data.labelled={path: x.jsonl}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sft=null"], "rm.model: missing, and there is no section sft whose model rm could start from; give rm.model"),
        (["sft=null", "rm.model={path: m}"], "ppo.policy is sft, and there is no section sft; add it, or add one of"),
        (["sft=null", "rm.model={path: m}", f"{DPO[:-1]}, model: {{path: m}}}}"], "or set ppo.policy to dpo"),
        (["ppo.policy=kto"], "ppo.policy is kto, and there is no section kto; add it, or set ppo.policy to sft"),
        (["rm=null"], "ppo.reward.rm is 0.2, and there is no section rm that makes the reward model; add it"),
        (["rm=null", "ppo.reward={exact: 1}", "ppo.critic.init=rm"], "ppo.critic.init is rm, and there is no section"),
        (["ppo.reward.prm=0.3"], "ppo.reward.prm is 0.3, and there is no section prm that makes the process reward"),
        (["ppo.algorithm.steps.coef=0.3"], "ppo.algorithm.steps.coef is 0.3, and there is no section prm that makes"),
        (["sft=null", "rm=null", "ppo=null"], "evaluate has no policy to sample from; add one of sft, dpo, kto, ppo"),
        (["data.sft=null"], "sft needs data.sft; give it a path, or leave sft out"),
        (
            ["sft=null", "data.sft=null", "rm=null", f"{DPO[:-1]}, model: {{path: m}}}}", "ppo.policy=dpo", *PTX],
            "ppo.ptx reads data.sft, and there is none; give it a path, or leave ppo.ptx out",
        ),
        (["data.pairs=null"], "rm needs data.pairs"),
        (["data.pairs=null", "rm=null", "ppo.reward={exact: 1}", DPO], "dpo needs data.pairs"),
        (["data.steps=null", PRM], "prm needs data.steps"),
        ([KTO], "kto needs data.labelled"),
        (["data.prompts=null"], "ppo needs data.prompts"),
        (["data.eval=null"], "ppo needs data.eval"),
        (["ppo=null", "data.eval=null"], "evaluate needs data.eval"),
    ],
)
def test_a_section_that_lacks_what_it_needs_is_refused_in_one_line(demo, overrides, message):
    with pytest.raises(SettingsError) as caught:
        load_pipeline(demo, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "policies"),
    [
        (["rm=null", "ppo.reward={exact: 1}"], ["sft", "ppo"]),
        (["ppo=null"], ["sft"]),
        (["ppo=null", DPO, KTO, LABELLED], ["sft", "dpo", "kto"]),
        (["ppo.policy=dpo", DPO], ["sft", "dpo", "ppo"]),
        (["sft=null", "ppo=null", "evaluate=null", "rm.model={path: m}", "data.sft=null"], []),
        (["rm=null", "ppo.reward={prm: 1}", PRM, "data.pairs=null"], ["sft", "ppo"]),
    ],
)
def test_a_section_may_be_left_out_where_nothing_needs_it(demo, overrides, policies):
    assert load_pipeline(demo, overrides).policies() == policies


@pytest.mark.parametrize(
    ("override", "start"),
    [("ppo.reward={rm: 1}", "rm"), ("ppo.reward={exact: 1}", "policy"), ("ppo.critic.init=policy", "policy")],
)
def test_the_critic_starts_from_the_reward_model_where_that_is_rewarded(demo, override, start):
    assert load_pipeline(demo, [override]).ppo.critic_init == start


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist; give the path of a YAML file"), ("a: [", "is not YAML"), ("- 1", "holds no settings")],
)
def test_files_that_are_no_pipeline(tmp_path, content, message):
    path = tmp_path / "p.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=message):
        load_pipeline(path)


def test_what_does_not_change_the_result_is_in_no_key(demo):
    plain = load_pipeline(demo)
    other = load_pipeline(
        demo,
        [
            "ppo.trainer={ranks: 1, zero_stage: 3, micro_batch_size: 4, save_steps: 1, step_timeout_s: 5}",
            "ppo.sampler.kv_cache_gib=2",
            "ppo.generate_timeout_s=9",
            "run.store=/elsewhere",
            "run.tracking.tensorboard=true",
        ],
    )
    for stage in ("sft", "rm", "ppo", "evaluate", "run"):
        assert key_settings(getattr(plain, stage)) == key_settings(getattr(other, stage))
    assert key_settings(plain.ppo) != key_settings(load_pipeline(demo, ["ppo.seed=1"]).ppo)


def test_settings_load_without_torch():
    code = "import sys, stages.plan; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'vllm', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
