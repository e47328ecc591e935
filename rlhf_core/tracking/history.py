"""The metrics of a stage: kept in metrics.jsonl, sent on as events, and to TensorBoard and W&B when asked for.

A training checkpoint takes the history along, so curves of a resumed stage have no gap and nothing twice.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import TrackingSettings
from rlhf_core.tracking.events import EventLog


class History:
    """Metrics by step and phase."""

    def __init__(self, directory: Path, events: EventLog, tracking: TrackingSettings, *, run_name: str, config: dict):
        self.events = events
        self.records: list[dict[str, Any]] = []
        self._path = directory / "metrics.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._tensorboard = _open_tensorboard(directory) if tracking.tensorboard else None
        self._wandb = _open_wandb(directory, tracking, run_name, config) if tracking.wandb_project else None

    def add(self, step: int, values: Mapping[str, float], phase: str = "train") -> None:
        record = {"step": step, "phase": phase, **{name: float(value) for name, value in values.items()}}
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.events.metrics(step, values, phase)
        self._track(record)

    def replace(self, records: list[dict[str, Any]]) -> None:
        """Takes over the records of a training checkpoint."""
        self.records = list(records)
        self._path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        for record in records:
            self._track(record)

    def curve(self, name: str, phase: str = "train") -> tuple[list[int], list[float]]:
        """(steps, values) of one metric."""
        points = [(r["step"], r[name]) for r in self.records if r["phase"] == phase and name in r]
        return [step for step, _ in points], [value for _, value in points]

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _track(self, record: dict[str, Any]) -> None:
        step, phase = record["step"], record["phase"]
        values = {f"{phase}/{name}": value for name, value in record.items() if name not in ("step", "phase")}
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({**values, "step": step})


def _open_tensorboard(directory: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory / "tensorboard"))


def _open_wandb(directory: Path, tracking: TrackingSettings, run_name: str, config: dict) -> Any:
    import wandb

    run = wandb.init(
        project=tracking.wandb_project,
        name=run_name,
        dir=str(directory),
        mode="offline" if tracking.wandb_mode == "offline" else "online",
        config=config,
        settings=wandb.Settings(silent=True, x_disable_stats=True, x_disable_meta=True),
    )
    run.define_metric("*", step_metric="step")
    return run
