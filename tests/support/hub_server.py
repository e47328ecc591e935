"""A Hugging Face hub on the loopback, with the parts of its interface that data sets and models are fetched through."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Hub:
    """repositories: `org/name`, or `org/name@commit` where commits differ, -> files. revisions: branch -> commit.

    The files of a gated repository want the token. `asked` are the paths of all requests.
    """

    repositories: Mapping[str, Files]
    revisions: Mapping[str, str]
    gated: frozenset[str] = frozenset()
    token: str = "secret"
    asked: list[str] = field(default_factory=list)

    @contextmanager
    def served(self) -> Iterator[str]:
        """Its address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self.hub.asked.append(self.path)
        parts = self.path.split("?")[0].strip("/").removeprefix("api/").split("/")
        parts = parts[1:] if parts[0] in ("datasets", "models") else parts
        repository, verb, path = "/".join(parts[:2]), "/".join(parts[2:3]), "/".join(parts[4:])
        revision = parts[3] if len(parts) > 3 else "main"
        commit = self.hub.revisions.get(revision, revision)
        files = self.hub.repositories.get(f"{repository}@{commit}") or self.hub.repositories.get(repository)
        if files is None:
            self._send(404, b"{}")
        elif verb == "resolve":
            self._send_file(files.get(path), commit, repository)
        elif verb == "tree":
            entries = [{"type": "file", "path": p, "size": len(c), "oid": _digest(c)} for p, c in files.items()]
            self._send(200, json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": name} for name in files]
            self._send(200, json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode())

    do_HEAD = do_GET

    def _send_file(self, content: bytes | None, commit: str, repository: str) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {self.hub.token}"
        if repository in self.hub.gated and not allowed:
            self._send(403, b"", **{"X-Error-Code": "GatedRepo"})
        elif content is None:
            self._send(404, b"", **{"X-Error-Code": "EntryNotFound"})
        else:
            self._send(200, content, ETag=f'"{_digest(content)}"', **{"X-Repo-Commit": commit})

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()
