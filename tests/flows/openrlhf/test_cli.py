"""`rlhf import-flags`: where it reads, where it writes, and what it says."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from rlhf_core.config.pipeline import load_pipeline

DOCS = Path(__file__).resolve().parents[3] / "docs" / "import-flags.md"
SCRIPT = """
openrlhf.cli.train_sft --pretrain org/model --dataset rows.jsonl --apply_chat_template --use_ms --use_wandb {key}
"""
KEY = "0123456789abcdef0123456789abcdef"


def run(*arguments: str, script: str | None = None):
    return CliRunner().invoke(app, ["import-flags", *arguments], input=script)


def test_a_script_on_standard_input():
    result = run(script=SCRIPT.format(key=KEY))
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["sft"]["model"] == {"hub": "org/model"}
    assert "note: --use_ms: download from ModelScope yourself and give the path\n" in result.stderr
    assert "# - --use_ms: download from ModelScope yourself and give the path\n" in result.stdout


def test_a_key_is_written_nowhere():
    result = run(script=SCRIPT.format(key=KEY))
    assert KEY not in result.output
    assert "WANDB_API_KEY" in result.stderr


def test_a_file_in_and_a_file_out(tmp_path: Path):
    script, out = tmp_path / "train.sh", tmp_path / "pipeline.yaml"
    script.write_text(SCRIPT.format(key=KEY), encoding="utf-8")
    assert run(str(script), "-o", str(out)).exit_code == 0
    settings = load_pipeline(out)
    assert settings.sft is not None
    assert settings.sft.seed == 42
    again = run(str(script), "-o", str(out))
    assert again.exit_code == 1
    assert "File exists" in again.stderr


def test_words_behind_two_dashes():
    command = "python -m openrlhf.cli.train_rm --pretrain a/b --dataset c/d --max_len 64"
    result = run("--", *command.split())
    assert yaml.safe_load(result.stdout)["rm"]["max_len"] == 64


def test_an_unknown_flag_is_one_line():
    result = run("--", "train_sft", "--learning_rat", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: --learning_rat: train_sft has no such flag; did you mean --learning_rate?\n"


@pytest.fixture(scope="module")
def blocks() -> list[tuple[str, str]]:
    """(language, text) of the page's fenced blocks."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_page_shows_what_comes_out(blocks: list[tuple[str, str]]):
    (script,) = [text for language, text in blocks if language == "sh"]
    (expected,) = [text for language, text in blocks if language == "yaml"]
    assert run("--prompts", "7473", script=script).stdout == expected
