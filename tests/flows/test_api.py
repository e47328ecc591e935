"""Our small client of Prefect's REST API, against a server on loopback that answers as Prefect does."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
import tenacity

from flows import api
from flows.api import Api

BUSY = b'{"exception_message":"Service Unavailable"}'


class Server(ThreadingHTTPServer):
    """Answers with `codes` in turn, the last one for ever; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.codes: list[int] = []
        self.asked: list[dict] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/api"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(json.loads(body))
        code = self.server.codes.pop(0) if len(self.server.codes) > 1 else self.server.codes[0]
        answer = b'{"id": "run-1"}' if code < 300 else BUSY
        self.send_response(code)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(tenacity.nap.time, "sleep", lambda _: None)
    server = Server()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("code", [429, 503])
def test_a_request_that_the_server_did_not_do_is_sent_again(server: Server, code: int):
    """Prefect answers 503 when two writers meet in SQLite: seen on CI while workers signed on and a run was created."""
    server.codes = [code, code, 201]
    with Api(server.url) as client:
        assert client.post("/deployments/1/create_flow_run", {"state": "x"}) == {"id": "run-1"}
    assert server.asked == [{"state": "x"}] * 3


def test_a_server_that_stays_busy_is_an_error_with_its_words(server: Server):
    server.codes = [503]
    with Api(server.url) as client, pytest.raises(httpx.HTTPStatusError, match=r"503 .*Service Unavailable"):
        client.post("/flow_runs/filter")
    assert len(server.asked) == api.ATTEMPTS


@pytest.mark.parametrize("code", [404, 409, 422, 500])
def test_other_refusals_are_not_repeated(server: Server, code: int):
    server.codes = [code]
    with Api(server.url) as client, pytest.raises(httpx.HTTPStatusError, match=str(code)):
        client.post("/flow_runs/filter")
    assert len(server.asked) == 1
