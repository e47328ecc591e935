"""Every command in the docs is run by a test: here, or by the test that is named beside it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app

PROJECT = Path(__file__).resolve().parents[1]
DOCS = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]

# Commands that want engines or a server, and the test that runs each.
RUN_ELSEWHERE = {
    "prefect deployment run sft-rm-ppo/demo --watch": "tests/flows/test_chain.py",
    """prefect deployment run sft-rm-ppo/demo --watch -p 'set=["ppo.steps=20"]'""": "tests/flows/test_chain.py",
    "rlhf run deployments/pipelines/demo.yaml --set ppo.steps=20": "tests/flows/test_chain.py",
    "rlhf merge-lora --base BASE --adapter MODEL/adapter --out MERGED": "tests/flows/test_merge_lora.py",
    "rlhf serve-reward --model DIR": "tests/flows/test_serve_reward.py",
    "rlhf serve-reward --model DIR --no-token": "tests/flows/test_serve_reward.py",
    "rlhf replay KEY --out DIR": "tests/stages/test_ppo_rewards.py",
    "rlhf replay KEY --out DIR --set ppo.algorithm.kl.coef=1.0 --steps 1": "tests/stages/test_ppo_rewards.py",
    "rlhf doctor mine.yaml": "tests/flows/test_doctor.py",
    "rlhf import-flags train.sh -o mine.yaml": "tests/flows/openrlhf/test_cli.py",
    "rlhf verify": "tests/flows/test_store_commands.py",
    "rlhf gc": "tests/flows/test_store_commands.py",
    "rlhf gc --older-than 14 --pipeline mine.yaml --delete": "tests/flows/test_store_commands.py",
    "rlhf lineage ppo/3f2a91 --svg lineage.svg": "tests/flows/test_store_commands.py",
    "source .venv/bin/activate": "Makefile",
}
COMMAND = re.compile(
    r"^    (?:\$ )?((?:make|rlhf|prefect|python|uv|source) .*?)(?:\s{2,}(?:#|\().*|\s+#.*)?$", re.MULTILINE
)


def commands() -> list[str]:
    return sorted({match.strip() for file in DOCS for match in COMMAND.findall(file.read_text())})


def test_the_docs_have_commands():
    assert {"make demo", "make test", "make up", "make down", "make check", "make bench"} <= set(commands())


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_docs_is_run(command: str, monkeypatch: pytest.MonkeyPatch):
    program, *words = command.split()
    if program == "make":
        done = subprocess.run(["make", "-n", *words], cwd=PROJECT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif command.startswith("rlhf plan"):
        monkeypatch.chdir(PROJECT)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert "evaluate" in result.output
    elif program == "python":
        script = next((word for word in words if word.endswith(".py")), None)
        assert script is None or (PROJECT / script).is_file()
        done = subprocess.run(
            [sys.executable, *words[: words.index(script) + 1 if script else 2], "--help"],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    else:
        assert command in RUN_ELSEWHERE, f"{command!r} is run by no test"
        assert (PROJECT / RUN_ELSEWHERE[command]).is_file()


def test_links_in_the_docs_lead_somewhere():
    for file in DOCS:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name}: {target}"
