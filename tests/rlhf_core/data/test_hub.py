"""Data sets of the Hugging Face hub, from a hub on the loopback with the parts of its interface that are asked for."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT, OLD_COMMIT = "c0ffee" + "0" * 34, "decade" + "0" * 34
REVISIONS = {"main": COMMIT, "v1": OLD_COMMIT}
CARD = """---
configs:
- config_name: sums
  default: true
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
- config_name: words
  data_files: [{split: train, path: words.jsonl}]
---
"""
REPOSITORIES = {
    "org/name": {
        "README.md": CARD,
        "train.jsonl": '{"prompt": "1+2?", "response": "3"}\n',
        "test.jsonl": '{"prompt": "5?", "response": "5"}\n',
        "words.jsonl": '{"text": "one"}\n',
    },
    f"org/name@{OLD_COMMIT}": {"train.jsonl": '{"text": "old"}\n'},
    "org/scripted": {"scripted.py": "raise SystemExit('the script was run')\n"},
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").removeprefix("api/").split("/")
        repository, name = "/".join(parts[1:3]), parts[-1]
        revision = parts[4] if len(parts) > 4 else "main"
        commit = REVISIONS.get(revision, revision)
        files = REPOSITORIES.get(f"{repository}@{commit}") or REPOSITORIES.get(repository)
        if files is None:
            self._send(404, b"{}")
        elif parts[3:4] == ["resolve"]:
            content = files.get(name)
            missing = {"X-Error-Code": "EntryNotFound"}
            found = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit} if content else missing
            self._send(200 if content else 404, (content or "").encode(), **found)
        elif parts[3:4] == ["tree"]:
            entries = [{"type": "file", "path": p, "size": len(c), "oid": _digest(c)} for p, c in files.items()]
            self._send(200, json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": path} for path in files]
            self._send(200, json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode())

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _digest(content: str) -> str:
    return hashlib.sha1(f"blob {len(content)}\0{content}".encode()).hexdigest()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


READ = """
import json, sys
from rlhf_core.data.errors import DataError
from rlhf_core.data.sources import hub_commit, read_hub
results = []
for arguments in json.loads(sys.argv[1]):
    try:
        results.append(read_hub(*arguments))
    except DataError as error:
        results.append(str(error))
print(json.dumps([hub_commit("org/name", sys.argv[2] or None), *results]))
"""


def read(home: Path, endpoint: str, requests: list[list[str | None]], revision: str = "", offline: str = "0") -> list:
    """[commit, then the rows or the error of each request], from a process of its own: the endpoint is read once."""
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", READ, json.dumps(requests), revision]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_splits_and_subsets_of_a_hub_data_set_and_what_it_does_not_have(hub: str, tmp_path: Path) -> None:
    train, test = [{"prompt": "1+2?", "response": "3"}], [{"prompt": "5?", "response": "5"}]
    commit, *results = read(
        tmp_path,
        hub,
        [
            ["org/name", None, None, None],
            ["org/name", "main", None, "test"],
            ["org/name", COMMIT, "words", None],
            ["org/name", "v1", None, None],
            ["org/name", None, None, "dev"],
            ["org/name", None, "numbers", None],
            ["org/absent", None, None, None],
            ["org/scripted", None, None, None],
        ],
    )
    assert commit == COMMIT
    assert results[:4] == [train, test, [{"text": "one"}], [{"text": "old"}]]
    for message, said in zip(results[4:], ("dev", "numbers", "404", "scripts are no longer supported"), strict=True):
        assert message.startswith("hub data set org/")
        assert said in message
        assert "\n" not in message
    # What was read once is there without the hub, where its commit is given.
    offline = read(tmp_path, hub, [["org/name", COMMIT, "sums", None]], COMMIT, offline="1")
    assert offline == [COMMIT, train]
