"""The few calls of Prefect's REST API that `rlhf` makes itself: `import prefect` takes seconds."""

import time
from typing import Any

import httpx
import tenacity

LIVE_STATES = ("RUNNING", "PENDING", "CANCELLING", "PAUSED")
CANCEL_MESSAGE = "cancelled by `rlhf down`"

# "Not done, ask again": Prefect answers so when two writers met in its SQLite file, having rolled the request back.
NOT_DONE = frozenset({httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE})
ATTEMPTS = 8


class Api:
    """A Prefect server at `url` (`http://host:port/api`). Connection faults and refusals raise httpx.HTTPError."""

    def __init__(self, url: str):
        self.url = url
        # trust_env off: a proxy meant for the internet must not see requests to this machine.
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5.0).is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        return self._json(self._send("GET", path))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._json(self._send("POST", path, json=body or {}))

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return self.get(f"/flow_runs/{flow_run_id}")

    def flow_runs(self, **filters: Any) -> list[dict[str, Any]]:
        """All flow runs that pass `filters` (Prefect's FlowRunFilter), newest first."""
        found: list[dict[str, Any]] = []
        while True:
            body = {"flow_runs": filters, "sort": "START_TIME_DESC", "limit": 200, "offset": len(found)}
            page = self.post("/flow_runs/filter", body)
            found.extend(page)
            if len(page) < 200:
                return found

    def set_state(self, flow_run_id: str, kind: str, name: str, message: str, *, force: bool = False) -> None:
        state = {"type": kind, "name": name, "message": message}
        self.post(f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": force})

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The first answer that is not NOT_DONE, or the last of ATTEMPTS, about 15 seconds later."""
        ask = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda response: response.status_code in NOT_DONE),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        return ask(self._http.request, method, path, **request)

    @staticmethod
    def _json(response: httpx.Response) -> Any:
        if response.is_error:
            detail = " ".join(response.text.split())[:500]
            raise httpx.HTTPStatusError(
                f"{response.request.method} {response.request.url.path}: {response.status_code} {detail}",
                request=response.request,
                response=response,
            )
        return response.json() if response.content else None


def live_runs(api: Api) -> list[dict[str, Any]]:
    """Runs that a process works on, or that a worker will take now: later runs of a schedule are left out."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    running = api.flow_runs(state={"type": {"any_": list(LIVE_STATES)}})
    due = api.flow_runs(state={"type": {"any_": ["SCHEDULED"]}}, expected_start_time={"before_": now})
    return running + due


def cancel_runs(api: Api, timeout_s: float) -> None:
    """Cancel all live runs and wait until none is left, at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    asked: set[str] = set()
    while runs := live_runs(api):
        for run in runs:
            if run["id"] in asked:
                continue
            asked.add(run["id"])
            if run["state_type"] == "SCHEDULED":
                # No process works on it, so nobody would ever turn Cancelling into Cancelled.
                api.set_state(run["id"], "CANCELLED", "Cancelled", CANCEL_MESSAGE)
            elif run["state_type"] != "CANCELLING":
                api.set_state(run["id"], "CANCELLING", "Cancelling", CANCEL_MESSAGE)
        if time.monotonic() >= deadline:
            return
        time.sleep(0.5)


def close_runs(api: Api) -> None:
    """Mark the runs that are left Cancelled; to be called when no worker and no flow process lives any more."""
    for run in live_runs(api):
        api.set_state(run["id"], "CANCELLED", "Cancelled", CANCEL_MESSAGE, force=True)
