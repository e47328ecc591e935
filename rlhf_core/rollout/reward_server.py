"""`rlhf serve-reward`: a reward model as an HTTP service in OpenRLHF's protocol.

Requests wait in one queue; a thread takes what has come together, whosever it is, as one batch. The event loop itself
only reads, writes and waits.
"""

import asyncio
import ipaddress
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

import prometheus_client
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field, ValidationError, model_validator

from rlhf_core.config.base import SettingsError
from rlhf_core.rollout.outcomes import one_line
from rlhf_core.rollout.reward_models import Encoded, Judged, QueryError, TextScorer


@dataclass(frozen=True)
class Limits:
    """batch_size: sequences in a forward pass. window_s: how long a batch waits for more once it has one.

    body_bytes, queries: of a request. pending: queries of all requests together that are not answered yet; above it
    requests are sent away (503).
    timeout_s: of a request, all of it.
    """

    batch_size: int = 32
    window_s: float = 0.005
    body_bytes: int = 16 * 2**20
    queries: int = 1024
    pending: int = 8192
    timeout_s: float = 180.0


class Queries(BaseModel):
    """A request. What else a client sends is left alone."""

    query: Annotated[list[str], Field(min_length=1)]
    prompts: list[str] | None = None
    labels: list[Any] | None = None

    @model_validator(mode="after")
    def _one_length(self) -> "Queries":
        for name in ("prompts", "labels"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.query):
                raise ValueError(f"{name} has {len(given)} entries for {len(self.query)} queries")
        return self


class Batcher:
    """Scores queries of all requests together, in a thread of its own, in the order in which they came."""

    def __init__(self, model: TextScorer, limits: Limits, metrics: "Metrics"):
        self._model, self._limits, self._metrics = model, limits, metrics
        self._waiting: asyncio.Queue[tuple[Encoded, asyncio.Future[Judged]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")

    async def score(self, encoded: Sequence[Encoded]) -> list[Judged]:
        """Raises what the model raised on a batch that one of these was in, as a RuntimeError."""
        futures = [asyncio.get_running_loop().create_future() for _ in encoded]
        for one, future in zip(encoded, futures, strict=True):
            self._waiting.put_nowait((one, future))
        self._metrics.pending.set(self._waiting.qsize())
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:  # of a request that has gone or failed: no forward pass for it
                future.cancel()

    async def run(self) -> None:
        while True:
            batch = await self._batch()
            if batch:
                await self._forward(batch)

    async def _batch(self) -> list[tuple[Encoded, "asyncio.Future[Judged]"]]:
        """At least one query, and those that come within the window; without those that nobody waits for any more."""
        batch = [await self._waiting.get()]
        try:
            async with asyncio.timeout(self._limits.window_s):
                while len(batch) < self._limits.batch_size:
                    batch.append(await self._waiting.get())
        except TimeoutError:
            pass
        self._metrics.pending.set(self._waiting.qsize())
        return [(one, future) for one, future in batch if not future.done()]

    async def _forward(self, batch: list[tuple[Encoded, "asyncio.Future[Judged]"]]) -> None:
        started = time.monotonic()
        encoded = [one for one, _ in batch]
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._model.score, encoded)
            judged = list(zip(batch, found, strict=True))
        except Exception as error:  # noqa: BLE001  one batch's fault: the service goes on
            self._metrics.failures.inc()
            for _, future in batch:
                if not future.done():
                    future.set_exception(RuntimeError(one_line(error)))
            return
        self._metrics.seconds.observe(time.monotonic() - started)
        self._metrics.sizes.observe(len(batch))
        for (_, future), one in judged:
            if not future.done():
                future.set_result(one)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Metrics:
    """For Prometheus, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        make: dict[str, Any] = {"namespace": "rlhf_reward", "registry": self.registry}
        self.requests = prometheus_client.Counter(
            "requests", "Requests to /get_reward by HTTP status.", ["status"], **make
        )
        self.queries = prometheus_client.Counter("queries", "Queries scored.", **make)
        self.failures = prometheus_client.Counter("forward_failures", "Batches on which the model failed.", **make)
        self.pending = prometheus_client.Gauge("pending", "Queries that wait.", **make)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        self.sizes = prometheus_client.Histogram("batch_size", "Queries in a batch.", buckets=sizes, **make)
        self.seconds = prometheus_client.Histogram("forward_seconds", "Seconds of a batch.", **make)


def make_app(model: TextScorer, *, token: str | None, limits: Limits) -> FastAPI:
    """The service. token: what /get_reward and /metrics ask for as a bearer token; None: nothing."""
    metrics = Metrics()
    batcher = Batcher(model, limits, metrics)
    # Beside the forward pass, so that the next batch is tokens when it is due.
    encoding = ThreadPoolExecutor(1, thread_name_prefix="encode")

    unanswered = 0  # queries that are being read as tokens, wait or are scored

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        batcher.close()
        encoding.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="rlhf serve-reward", lifespan=running, docs_url=None, redoc_url=None, openapi_url=None)

    def check_token(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token is not None and not secrets.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(
                401, "give the service's token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
            )

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "kind": model.kind}

    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        check_token(request)
        return Response(prometheus_client.generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict[str, Any]:
        try:
            check_token(request)
            async with asyncio.timeout(limits.timeout_s):
                answer = await scored(await _read(request, limits))
        except TimeoutError:
            metrics.requests.labels(504).inc()
            raise HTTPException(504, f"no reward within {limits.timeout_s:g} s") from None
        except HTTPException as error:
            metrics.requests.labels(error.status_code).inc()
            raise
        metrics.requests.labels(200).inc()
        return answer

    async def scored(queries: Queries) -> dict[str, Any]:
        nonlocal unanswered
        size = len(queries.query)
        if unanswered + size > limits.pending:
            raise HTTPException(503, f"{unanswered} queries wait; come again", {"Retry-After": "1"})
        unanswered += size
        try:
            loop = asyncio.get_running_loop()
            encoded = await loop.run_in_executor(encoding, _encode, model, queries)
            found = await batcher.score(encoded)
        except RuntimeError as error:
            raise HTTPException(500, f"the model failed: {error}") from None
        finally:
            unanswered -= size
        metrics.queries.inc(size)
        return _answer(found)

    return app


async def _read(request: Request, limits: Limits) -> Queries:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise HTTPException(413, f"the request exceeds {limits.body_bytes} bytes")
    try:
        queries = Queries.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise HTTPException(422, f"{'.'.join(map(str, first['loc'])) or 'request'}: {first['msg']}") from None
    if len(queries.query) > limits.queries:
        raise HTTPException(413, f"{len(queries.query)} queries are more than {limits.queries} in a request")
    return queries


def _encode(model: TextScorer, queries: Queries) -> list[Encoded]:
    prompts = queries.prompts if queries.prompts is not None else [None] * len(queries.query)
    encoded = []
    for number, (query, prompt) in enumerate(zip(queries.query, prompts, strict=True)):
        try:
            encoded.append(model.encode(query, prompt))
        except QueryError as error:
            raise HTTPException(422, f"query.{number}: {one_line(error)}") from None
    return encoded


def _answer(found: Sequence[Judged]) -> dict[str, Any]:
    """`step_scores` is ours, and there for process reward models alone. A reward that is no number is null, which our
    client takes for a failure of that response: JSON has no NaN."""
    rewards = [_number(one.reward) for one in found]
    answer: dict[str, Any] = {"rewards": rewards, "scores": rewards, "extra_logs": {}}
    steps = [[_number(step) for step in one.steps] for one in found if one.steps is not None]
    if steps:
        answer |= {"extra_logs": {"steps": [len(own) for own in steps]}, "step_scores": steps}
    return answer


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def check_access(host: str, token: str | None) -> None:
    """Refuses a service without a token that other machines could reach."""
    if token is None and not _is_loopback(host):
        raise SettingsError(f"--no-token is for the loopback, and --host is {host}; use 127.0.0.1, or a token")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket of the address that nobody can connect to yet. Port 0: a free one. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error}; give another --host or --port") from None
    return made


def serve(app: FastAPI, listening: socket.socket) -> None:
    """Until SIGINT or SIGTERM."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
