"""JSON over HTTP with a limit on all of a request's time, tries with back-off, and a bounded number under way."""

import asyncio
import itertools
import json
import os
import random
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx
import tenacity

from rlhf_core.config.base import SettingsError
from rlhf_core.rollout.outcomes import Failed, Reason, one_line

T = TypeVar("T")

# Passing: the same request may succeed later or elsewhere.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
# What the request holds is at fault, and not its address or its token.
_OF_THE_BODY = frozenset({400, 413, 422})
_ANSWER_BYTES = 64 * 2**20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 20.0


class RequestError(Exception):
    """A request without a usable answer. refused: the service says that something in its body is wrong."""

    def __init__(self, reason: Reason, message: str, *, passing: bool, refused: bool = False, wait_s: float = 0.0):
        super().__init__(message)
        self.reason: Reason = reason
        self.passing, self.refused, self.wait_s = passing, refused, wait_s

    @property
    def failure(self) -> Failed:
        return Failed(self.reason, one_line(self))


class JsonClient:
    """Posts to the endpoints of one service in turn; a try that fails goes on at the next one. For one event loop."""

    def __init__(self, urls: Sequence[str], *, token: str | None, concurrency: int, timeout_s: float, attempts: int):
        self._urls = itertools.cycle(urls)
        self._timeout_s, self._attempts = timeout_s, attempts
        self._under_way = asyncio.Semaphore(concurrency)
        # Its own generator: waiting draws no numbers from the one that user code may have seeded.
        self._random = random.Random()
        direct = {f"all://{host}": httpx.AsyncHTTPTransport() for host in ("127.0.0.1", "localhost")}
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            # The limit on a whole request is kept below; httpx has only limits between two bytes.
            timeout=None,
            # A proxy meant for the internet does not see requests to this machine.
            mounts=direct,
        )

    async def post(self, body: Mapping[str, Any]) -> Any:
        """The answer's JSON. Raises RequestError once no try is left, or none would help."""
        tries = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=self._wait,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, RequestError) and error.passing),
            reraise=True,
        )
        async with self._under_way:
            return await tries(self._once, body)

    async def _once(self, body: Mapping[str, Any]) -> Any:
        url = next(self._urls)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(url, body)
        except TimeoutError:
            raise RequestError("timeout", f"{url}: no answer within {self._timeout_s:g} s", passing=True) from None
        except httpx.RequestError as error:  # lost, or an answer that is no HTTP or of another encoding than it says
            message = f"{url}: {type(error).__name__}: {error}"
            raise RequestError("error", message, passing=True) from error

    async def _exchange(self, url: str, body: Mapping[str, Any]) -> Any:
        async with self._http.stream("POST", url, json=body) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _ANSWER_BYTES:
                    raise RequestError("error", f"{url}: the answer exceeds {_ANSWER_BYTES} bytes", passing=False)
        if response.is_success:
            try:
                return json.loads(content)
            except (ValueError, RecursionError):
                raise RequestError("unparsable", f"{url}: the answer is no JSON", passing=False) from None
        said = content[:200].decode(errors="replace")
        passing = response.status_code in _PASSING
        raise RequestError(
            "error",
            f"{url}: HTTP {response.status_code}: {said}",
            passing=passing,
            refused=response.status_code in _OF_THE_BODY,
            wait_s=_seconds(response.headers.get("retry-after")),
        )

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Twice as long each time, by chance up to half less; what the service asks for where that is longer."""
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.wait_s if isinstance(error, RequestError) else 0.0
        longest = min(_FIRST_WAIT_S * 2 ** (state.attempt_number - 1), _LONGEST_WAIT_S)
        return min(max(asked, longest * self._random.uniform(0.5, 1.0)), _LONGEST_WAIT_S)

    async def close(self) -> None:
        await self._http.aclose()


def _seconds(header: str | None) -> float:
    """Of a Retry-After that is a number; its other form, a date, counts as none."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0


def secret(setting: str, variable: str | None) -> str | None:
    """The value of the environment variable that a setting names. Raises SettingsError where it is not set."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise SettingsError(f"{setting} names the environment variable {variable}, which is not set; set it")
    return value


class EventLoop:
    """An asyncio loop in a thread of its own, for code that is not asynchronous. To be closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="requests")
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """What is under way is cancelled."""
        self.submit(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
