"""Models of the Hugging Face hub, from a hub on the loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Hub

COMMIT, OLD_COMMIT = "c0ffee" + "0" * 34, "decade" + "0" * 34
MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    # What is not fetched: weights that are unpickled, code, other formats of the same weights.
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"raise SystemExit('the code was run')",
    "original/consolidated.safetensors": b"weights",
    "consolidated.safetensors": b"weights",
    "README.md": b"# A model",
}
FETCHED = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
REPOSITORIES = {
    "org/model": MODEL,
    f"org/model@{OLD_COMMIT}": {**MODEL, "model.safetensors": b"old weights"},
    "org/gated": MODEL,
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle", "tokenizer.json": b"{}"},
}

FETCH = """
import json, sys
from rlhf_core.config.base import SettingsError
from rlhf_core.models.hub import fetch_model
results = []
for name, revision in json.loads(sys.argv[1]):
    try:
        directory = fetch_model(name, revision)
        results.append([str(directory), {path.name: path.read_text() for path in sorted(directory.rglob("*"))}])
    except SettingsError as error:
        results.append(str(error))
print(json.dumps(results))
"""


def fetch(home: Path, endpoint: str, *models: tuple[str, str | None], **variables: str) -> list:
    """[directory, its files], or the error, of each; from a process of its own: the hub's address is read once."""
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", FETCH, json.dumps(models)]
    done = subprocess.run(
        command, env=os.environ | given | variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_training_reads_of_a_revision_is_fetched_once(tmp_path: Path) -> None:
    hub = Hub(REPOSITORIES, {"main": COMMIT, "v1": OLD_COMMIT})
    with hub.served() as address:
        (main, files), (old, old_files) = fetch(tmp_path, address, ("org/model", None), ("org/model", "v1"))
        assert sorted(files) == sorted(old_files) == FETCHED
        assert (files["model.safetensors"], old_files["model.safetensors"]) == ("weights", "old weights")
        hub.asked.clear()
        # A rank is given the commit: what is in the cache takes no request, and no hub.
        assert fetch(tmp_path, address, ("org/model", COMMIT)) == [[main, files]]
        assert hub.asked == []
    assert fetch(tmp_path, address, ("org/model", OLD_COMMIT), HF_HUB_OFFLINE="1") == [[old, old_files]]


def test_a_gated_model_takes_the_token_of_the_environment(tmp_path: Path) -> None:
    hub = Hub(REPOSITORIES, {"main": COMMIT}, gated=frozenset({"org/gated"}))
    with hub.served() as address:
        (refused,) = fetch(tmp_path, address, ("org/gated", None))
        assert refused.startswith("model org/gated of the hub cannot be read: ")
        assert "HF_TOKEN in the environment for a gated one" in refused
        ((_, files),) = fetch(tmp_path, address, ("org/gated", None), HF_TOKEN=hub.token)
    assert sorted(files) == FETCHED


@pytest.mark.parametrize(
    ("model", "offline", "said"),
    [
        (("org/absent", None), "0", "404"),
        (("org/pickled", None), "0", f"has no weights (*.safetensors) at commit {COMMIT}; give a complete model"),
        (("not/a/name", None), "0", "not/a/name"),
        (("org/model", None), "1", "offline mode"),
        (("org/model", COMMIT), "1", "or a `path`"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(
    tmp_path: Path, model: tuple[str, str | None], offline: str, said: str
) -> None:
    with Hub(REPOSITORIES, {"main": COMMIT}).served() as address:
        (message,) = fetch(tmp_path, address, model, HF_HUB_OFFLINE=offline)
    assert message.startswith(f"model {model[0]} of the hub ")
    assert said in message
    assert "\n" not in message
