"""What `rlhf run` and `rlhf demo` show: a bar for each node while the run lives, and the memory of its processes."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flows.api import Api
from flows.guardian import EVENTS
from flows.processes import ProcessId, alive, descendants
from flows.services import ServicesError
from flows.supervisor import EventTail, attempt_scratch

POLL_S = 0.5
PATIENCE_S = 120.0  # for a server that lives and gives no good answer
MEMORY_EVERY_S = 2.0
FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@dataclass
class NodeView:
    """What is known of one node: read from its run's state and, on this machine, from its events.jsonl."""

    done: float = 0.0  # between 0 and 1
    text: str = "waits"
    tail: EventTail | None = None

    def event(self, event: dict[str, Any]) -> None:
        if event["type"] == "phase":
            self.text = event["name"]
        elif event["type"] == "progress":
            self.done = min(1.0, event["step"] / max(event["total"], 1))
            self.text = f"{event['phase']} {event['step']}/{event['total']}"
        elif event["type"] == "error":
            self.text = f"{event['kind']}: {event['message']}"


@dataclass
class RunView:
    """The nodes of a run, brought up to date by `refresh`."""

    run_id: str
    nodes: dict[str, NodeView]
    _attempts: dict[str, str] = field(default_factory=dict)

    def refresh(self, api: Api) -> dict[str, Any]:
        """Ask the server; returns the pipeline's own run."""
        run = api.flow_run(self.run_id)
        children = api.flow_runs(tags={"all_": [f"parent:{self.run_id}"]})
        for child in sorted(children, key=lambda child: child["created"]):
            spec = child["parameters"]["spec"]
            self._show(self.nodes[spec["node"]], spec, child)
        return run

    def _show(self, view: NodeView, spec: dict[str, Any], child: dict[str, Any]) -> None:
        attempt = attempt_scratch(spec["run"]["scratch"], spec["node"], spec["key"], child["id"], child["run_count"])
        if self._attempts.get(spec["node"]) != str(attempt):
            self._attempts[spec["node"]] = str(attempt)
            view.tail = EventTail(attempt / EVENTS, from_start=True)
        if child["state_type"] == "COMPLETED":
            view.done, view.text = 1.0, "made"
        elif child["state_type"] in FINAL_STATES:
            view.text = child["state_name"].lower()
        elif child["state_type"] == "RUNNING" and view.tail is not None:
            view.tail.deliver(view.event)
        else:
            view.text = child["state_name"].lower()


def follow(api: Api, view: RunView, console: Console, dead_service: Callable[[], str | None]) -> dict[str, Any]:
    """Show the run until it ends; returns the run as it ended.

    `dead_service` names a service that has died, or None: a run without its worker would be waited for in vain.
    Raises httpx.HTTPError once the server has given no good answer for PATIENCE_S.
    """
    columns = [
        TextColumn("{task.fields[node]:<13}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {
            node: progress.add_task("", total=1.0, node=node, text=state.text, start=False)
            for node, state in view.nodes.items()
        }
        told: dict[str, str] = {}
        answered = time.monotonic()
        while True:
            try:
                run = view.refresh(api)
                answered = time.monotonic()
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                # A busy server answers late, or with a 5xx; a dead one shows below.
                if _refused(error) or time.monotonic() - answered > PATIENCE_S:
                    raise
                run = None
            _draw(progress, bars, view)
            if not console.is_terminal:
                _tell(console, view, told)
            if run is not None and run["state_type"] in FINAL_STATES:
                return run
            dead = dead_service()
            if dead is not None:
                raise ServicesError(dead)
            time.sleep(POLL_S)


def _refused(error: httpx.HTTPError) -> bool:
    """Whether the same question would get the same answer."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500


def _draw(progress: Progress, bars: dict[str, TaskID], view: RunView) -> None:
    for node, state in view.nodes.items():
        if state.tail is not None and state.done < 1.0:
            progress.start_task(bars[node])
        progress.update(bars[node], completed=state.done, text=state.text)
        if state.done >= 1.0:
            progress.stop_task(bars[node])


def _tell(console: Console, view: RunView, told: dict[str, str]) -> None:
    """Where no bar can be drawn (a log file): a line for each change but the step numbers."""
    for node, state in view.nodes.items():
        text = state.text.rstrip("0123456789/ ")
        if told.get(node) != text:
            told[node] = text
            console.print(f"{node:<13} {state.text}")


class MemoryPeak(threading.Thread):
    """The largest sum, over time, of the memory of some processes and all their descendants.

    Proportional set sizes: pages that processes share (libraries, Ray's object store) count once.
    """

    def __init__(self, roots: Callable[[], list[ProcessId]]):
        super().__init__(name="memory-peak", daemon=True)
        self.peak_bytes = 0
        self._roots = roots
        self._stopped = threading.Event()

    def run(self) -> None:
        while True:
            roots = [root for root in self._roots() if alive(root)]
            pids = {root.pid for root in roots} | {p.pid for root in roots for p in descendants(root.pid)}
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional_set_size, pids)))
            if self._stopped.wait(MEMORY_EVERY_S):
                return

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def proportional_set_size(pid: int) -> int:
    """Bytes; 0 for a process that has gone or belongs to someone else."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
