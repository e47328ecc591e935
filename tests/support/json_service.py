"""An HTTP service on the loopback that answers as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A request's body and number (from 0), to (status, the answer's body: JSON, or bytes as they are).
Answer = Callable[[dict[str, Any], int], tuple[int, Any]]


@dataclass
class Service:
    """requests: bodies in the order of arrival. tokens: their Authorization headers. connections: opened so far."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    connections: int = 0
    most_at_once: int = 0


@contextmanager
def serving(answer: Answer) -> Iterator[Service]:
    lock = threading.Lock()
    under_way = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            with lock:
                service.connections += 1

        def do_POST(self) -> None:
            nonlocal under_way
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(service.requests)
                service.requests.append(body)
                service.tokens.append(self.headers["Authorization"])
                under_way += 1
                service.most_at_once = max(service.most_at_once, under_way)
            status, given = answer(body, number)
            with lock:
                under_way -= 1
            content = given if isinstance(given, bytes) else json.dumps(given).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = Service(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
