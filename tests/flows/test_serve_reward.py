"""`rlhf serve-reward`: the command, with a tiny model."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from reward_models import digits, write_reward_model
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from flows.cli import app

COMMAND = [sys.executable, "-c", "from flows.cli import app; app()", "serve-reward"]


@pytest.mark.engines
def test_a_reward_model_is_served_until_it_is_told_to_end(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path)
    options = ["--model", str(model), "--port", "0", "--device", "cpu", "--dtype", "float32"]
    environment = os.environ | {"RLHF_REWARD_TOKEN": "t0ken"}
    server = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        found = re.search(r"reward model .*: (http://127\.0\.0\.1:\d+)/get_reward", said)
        assert found, said
        transport = httpx.HTTPTransport(retries=5)  # its socket listens right after the line
        with httpx.Client(base_url=found[1], transport=transport, trust_env=False) as client:
            body = {"query": ["3+4=7"], "prompts": ["3+4="], "labels": ["7"]}
            assert client.post("/get_reward", json=body).status_code == 401
            answer = client.post("/get_reward", json=body, headers={"Authorization": "Bearer t0ken"}).json()
        with torch.no_grad():
            lm = AutoModelForSequenceClassification.from_pretrained(model)
            expected = lm(torch.tensor([[*digits("3+4=7"), 2]])).logits.item()
        assert answer["rewards"] == pytest.approx([expected], rel=1e-4)
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ([], "error: --token-env names the environment variable RLHF_REWARD_TOKEN, which is not set; set it"),
        (["--no-token", "--host", "0.0.0.0"], "error: --no-token is for the loopback, and --host is 0.0.0.0"),
        (["--no-token", "--port", "0"], "config.json cannot be read"),
    ],
)
def test_its_errors_are_one_line(options: list[str], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_REWARD_TOKEN", raising=False)
    result = CliRunner().invoke(app, ["serve-reward", "--model", "/nowhere", *options])
    assert result.exit_code == 1
    assert fault in result.output
    assert result.output.count("\n") == 1
