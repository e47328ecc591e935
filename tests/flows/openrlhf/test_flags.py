"""Every flag of every command, by every spelling: taken, and either seen in the pipeline or noted."""

import re
from collections import Counter
from pathlib import Path

import pytest
from openrlhf_flags import NEEDED, all_spellings, imported, values_of

from flows.openrlhf.flags import COMMANDS
from rlhf_core.config.base import SettingsError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "openrlhf-options.md"
ROW = re.compile(r"^\| (`--.*?) \| (.*) \|$", re.MULTILINE)

SPELLINGS = [(command, spelling) for command in COMMANDS for spelling in sorted(all_spellings(command))]


@pytest.mark.parametrize(("command", "spelling"), SPELLINGS)
def test_a_flag_shows_in_the_pipeline_or_has_a_note(command: str, spelling: str):
    names = all_spellings(command)[spelling]
    without = imported(command, {})
    values = values_of(COMMANDS[command].flags[names[0]])
    given = imported(command, {spelling: values}, without=names)
    noted = [note for note in given.notes if note.flag == f"--{spelling}"]
    assert given.values != without.values or noted


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_named_with_its_command(command: str):
    with pytest.raises(SettingsError, match=rf"^--no_such: {command} has no such flag"):
        imported(command, {"no_such": ["1"]})


def test_a_flag_of_another_command_is_unknown():
    with pytest.raises(SettingsError, match=r"--actor\.adam\.lr: train_sft has no such flag"):
        imported("train_sft", {"actor.adam.lr": ["1e-6"]})
    with pytest.raises(SettingsError, match="--multiturn: train_dpo has no such flag"):
        imported("train_dpo", {"multiturn": []})


def test_both_spellings_give_one_pipeline():
    new = {
        "actor.adam.lr": ["5e-7"],
        "critic.adam.lr": ["9e-6"],
        "actor.adam.betas": ["0.9", "0.98"],
        "critic.adam.betas": ["0.9", "0.98"],
        "algo.advantage.estimator": ["gae"],
        "algo.kl.init_coef": ["0.02"],
        "rollout.batch_size": ["128"],
        "train.micro_batch_size": ["4"],
        "ds.zero_stage": ["3"],
        "actor.gradient_checkpointing_enable": [],
    }
    old = {
        "actor_learning_rate": ["5e-7"],
        "critic_learning_rate": ["9e-6"],
        "adam_betas": ["0.9", "0.98"],
        "advantage_estimator": ["gae"],
        "init_kl_coef": ["0.02"],
        "rollout_batch_size": ["128"],
        "micro_train_batch_size": ["4"],
        "zero_stage": ["3"],
        "gradient_checkpointing": [],
    }
    assert imported("train_ppo_ray", new).values == imported("train_ppo_ray", old).values


def documented() -> list[tuple[str, str, str]]:
    """(command, flag, what is here instead) of the page's tables."""
    of_heading = {
        "SFT, RM and DPO": ("train_sft", "train_rm", "train_dpo"),
        "SFT alone": ("train_sft",),
        "RM alone": ("train_rm",),
        "DPO alone": ("train_dpo",),
        "PRM": ("train_prm",),
        "RL": ("train_ppo_ray",),
    }
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    return [
        (command, flag, meaning)
        for section in sections
        for flags, meaning in ROW.findall(section)
        for flag in re.findall(r"--([\w.]+)", flags)
        for command in of_heading.get(section.partition("\n")[0], ())
    ]


def test_the_docs_list_the_options_of_each_command():
    counts = Counter(command for command, _, _ in documented())
    # Of the reference's tables: shared and own options.
    assert counts == {"train_sft": 77, "train_rm": 79, "train_dpo": 82, "train_prm": 62, "train_ppo_ray": 167}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_docs_list_is_taken_and_what_they_miss_is_noted(command: str):
    for of, flag, meaning in documented():
        if of != command:
            continue
        assert flag in all_spellings(command), flag
        if meaning.startswith(("none", "left out", "not here yet")):
            name = all_spellings(command)[flag][0]
            given = imported(command, {flag: values_of(COMMANDS[command].flags[name])})
            assert any(note.flag == f"--{flag}" for note in given.notes), flag


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_cannot_do_without_is_named(command: str):
    for name in NEEDED[command]:
        if COMMANDS[command].flags[name].default is not None:
            continue
        with pytest.raises(SettingsError, match=rf"--{name} of {command}: is missing"):
            imported(command, {}, without=[name])


@pytest.mark.parametrize(
    ("flag", "values", "message"),
    [
        ("train.batch_size", ["many"], "--train.batch_size of train_sft wants a whole number (given many)"),
        ("train.batch_size", [], "--train.batch_size of train_sft wants a whole number (given none)"),
        ("adam.betas", ["0.9"], "--adam.betas of train_sft wants two numbers (given 0.9)"),
        ("ds.packing_samples", ["True"], "--ds.packing_samples of train_sft wants no value (given True)"),
        ("ds.param_dtype", ["fp8"], "--ds.param_dtype of train_sft is one of bf16, fp16 (given fp8)"),
        ("max_len", ["$LENGTH"], "(a shell variable that the script does not set)"),
        ("adam.lr", ["-1"], "train_sft: what its flags mean here is refused: sft.optimizer.lr"),
        ("data.dataset_probs", ["0.5,0.5"], "--data.dataset_probs of train_sft: has 2 numbers for 1 data sets"),
    ],
)
def test_a_wrong_value_is_one_line(flag: str, values: list[str], message: str):
    with pytest.raises(SettingsError) as error:
        imported("train_sft", {flag: values})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
