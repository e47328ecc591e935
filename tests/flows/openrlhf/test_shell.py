"""Scripts as the field writes them: where the command is, and what its words are once the shell has read them."""

import pytest

from flows.openrlhf.shell import CommandLine, from_arguments, from_script, from_words
from rlhf_core.config.base import SettingsError


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("deepspeed --module openrlhf.cli.train_sft --a 1 --b", ["--a", "1", "--b"]),
        ("python3 -m openrlhf.cli.train_sft --a=1", ["--a=1"]),
        ("python openrlhf/cli/train_sft.py --a 1", ["--a", "1"]),
        ("cd /x && CUDA_VISIBLE_DEVICES=0 python -m openrlhf.cli.train_sft --a 1 && echo done", ["--a", "1"]),
        ("python -m openrlhf.cli.train_sft --a 1 2>&1 | tee log", ["--a", "1"]),
        ("python -m openrlhf.cli.train_sft --a 1 > log &", ["--a", "1"]),
        ("python -m openrlhf.cli.train_sft \\\n --a 1 \\\n --b 'x y' # why\necho --c", ["--a", "1", "--b", "x y"]),
        ("# python -m openrlhf.cli.train_rm --z\npython -m openrlhf.cli.train_sft --a 1", ["--a", "1"]),
        # A comment ends the command, whatever its line ends with.
        ("python -m openrlhf.cli.train_sft \\\n  --a 1 \\\n  # --b 2 \\\nfi", ["--a", "1"]),
        ("python -m openrlhf.cli.train_sft --name run#1", ["--name", "run#1"]),
        ("X=3\nexport Y=\"$X/4\"\npython -m openrlhf.cli.train_sft --a ${Y} --b $X", ["--a", "3/4", "--b", "3"]),
        ("python -m openrlhf.cli.train_sft --a ${N:-8} --b ${M}", ["--a", "8", "--b", "${M}"]),
        ("python -m openrlhf.cli.train_sft --t $'U: {}\\nA: '", ["--t", "U: {}\nA: "]),
        ("python -m openrlhf.cli.train_sft --t 'U: {}\\nA: '", ["--t", "U: {}\\nA: "]),
        ("A=(--a 1 # no\n --b \"x y\"\n)\npython -m openrlhf.cli.train_sft ${A[@]}", ["--a", "1", "--b", "x y"]),
        ("A=(--a 1)\nA+=(--b)\npython -m openrlhf.cli.train_sft \"${A[@]}\" --c", ["--a", "1", "--b", "--c"]),
    ],
)  # fmt: skip
def test_the_words_of_a_script(script: str, words: list[str]):
    line = from_script(script)
    assert (line.name, list(line.words)) == ("train_sft", words)


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --a 1", 4),
        ("torchrun --nnodes=2 --nproc-per-node=8 -m openrlhf.cli.train_sft", 16),
        ("deepspeed --module openrlhf.cli.train_sft", None),
        ("read -r -d '' c <<EOF\nopenrlhf.cli.train_sft --a 1\nEOF\ntorchrun --nproc-per-node ${N:-8} -m $c", 8),
    ],
)
def test_the_processes_that_a_launcher_starts(script: str, ranks: int | None):
    assert from_script(script).ranks == ranks


def test_words_as_a_shell_hands_them_over():
    words = ["deepspeed", "--num_gpus", "2", "--module", "openrlhf.cli.train_dpo", "--t", "two words"]
    assert from_words(words) == CommandLine("train_dpo", ("--t", "two words"), 2)
    assert from_words(["train_rm", "--a", "1"]) == CommandLine("train_rm", ("--a", "1"))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo nothing", "the script holds no training command"),
        ("python -m openrlhf.cli.train_kd --a 1", "train_kd is no command that is read here"),
        (
            "python -m openrlhf.cli.train_sft --a 1\npython -m openrlhf.cli.train_rm --b 2",
            "the script holds 2 training commands (train_sft, train_rm)",
        ),
        ("python -m openrlhf.cli.train_sft --a 'open", "the command cannot be split into words: No closing quotation"),
    ],
)
def test_what_is_no_command_is_one_line(script: str, message: str):
    with pytest.raises(SettingsError) as error:
        from_script(script)
    assert str(error.value).startswith(message)


def test_a_script_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingsError, match=r"^script .*none\.sh cannot be read"):
        from_arguments([str(tmp_path / "none.sh")])
