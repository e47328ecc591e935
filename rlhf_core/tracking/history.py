"""The metrics of a stage: kept in metrics.jsonl, sent on as events, and to TensorBoard and W&B when asked for.

A training checkpoint takes the history along, so curves of a resumed stage have no gap and nothing twice. Its records
and samples are JSON: a NaN or infinity, which JSON lacks, is the string 'nan', 'inf' or '-inf', as in the manifest.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import TrackingSettings
from rlhf_core.tracking.events import EventLog


class History:
    """Metrics by step and phase, the samples shown on the way, and what the same prompts were answered each time."""

    def __init__(self, directory: Path, events: EventLog, tracking: TrackingSettings, *, run_name: str, config: dict):
        self.events = events
        self.records: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.generations: list[dict[str, Any]] = []
        self._directory = directory
        self._path = directory / "metrics.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._every_steps = tracking.every_steps
        self._tensorboard = _open_tensorboard(directory) if tracking.tensorboard else None
        self._wandb = _open_wandb(directory, tracking, run_name, config) if tracking.wandb_project else None

    def add(self, step: int, values: Mapping[str, float], phase: str = "train") -> None:
        record = {"step": step, "phase": phase, **{name: _json_number(value) for name, value in values.items()}}
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.events.metrics(step, values, phase)
        self._track(record)

    def add_sample(self, step: int, *, reward: float, step_scores: Sequence[float] | None = None, **texts: str) -> None:
        sample = {"step": step, **texts, "reward": _json_number(reward)}
        if step_scores is not None:
            sample["step_scores"] = [_json_number(score) for score in step_scores]
        self.samples.append(sample)
        self.events.write("sample", **self.samples[-1])

    def add_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The responses to the same prompts at `step`: rows with equal columns, `prompt` and `response` among them."""
        made = [{"step": step, **row} for row in rows]
        self.generations += made
        self._track_generations(step, made)

    def replace(
        self,
        records: list[dict[str, Any]],
        samples: list[dict[str, Any]],
        generations: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Takes over the records, samples and generations of a training checkpoint."""
        self.records, self.samples, self.generations = list(records), list(samples), list(generations)
        self._path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        for record in records:
            self._track(record)
        for step in dict.fromkeys(row["step"] for row in generations):
            self._track_generations(step, [row for row in generations if row["step"] == step])

    def curve(self, name: str, phase: str = "train") -> tuple[list[int], list[float]]:
        """(steps, values) of one metric. A NaN or infinity stays one: a plot leaves it out, a last value shows it."""
        points = [(r["step"], float(r[name])) for r in self.records if r["phase"] == phase and name in r]
        return [step for step, _ in points], [value for _, value in points]

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            _close_wandb(self._wandb, self._directory / "wandb")

    def _track(self, record: dict[str, Any]) -> None:
        """To TensorBoard and W&B, where its turn has come."""
        step, phase = record["step"], record["phase"]
        if phase == "train" and step % self._every_steps:
            return
        values = {f"{phase}/{name}": float(value) for name, value in record.items() if name not in ("step", "phase")}
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({**values, "step": step})

    def _track_generations(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """As text and as a table, of this step alone: W&B would send a growing one whole each time."""
        if not rows:
            return
        columns: list[Any] = list(rows[0])
        cells: list[Any] = [list(row.values()) for row in rows]
        if self._tensorboard is not None:
            self._tensorboard.add_text("generations", markdown_table(columns, cells), step)
        if self._wandb is not None:
            import wandb

            self._wandb.log({"generations": wandb.Table(columns=columns, data=cells), "step": step})


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Cells are shown on one line, as code where they are text."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, str):
        return f"{value:.3g}" if isinstance(value, float) else str(value)
    text = " ".join(value.split()).replace("|", "\\|").replace("`", "'")
    text = text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."
    return f"`{text}`" if text else ""


_CELL = 300  # characters


def _json_number(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _open_tensorboard(directory: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory / "tensorboard"))


def _open_wandb(directory: Path, tracking: TrackingSettings, run_name: str, config: dict) -> Any:
    import wandb

    run = wandb.init(
        project=tracking.wandb_project,
        entity=tracking.wandb_entity,
        group=tracking.wandb_group,
        name=f"{tracking.run_name}-{run_name}" if tracking.run_name else run_name,
        dir=str(directory),
        mode="offline" if tracking.wandb_mode == "offline" else "online",
        config=config,
        # The files are published: no host name, no output, no command line, no repository.
        settings=wandb.Settings(
            silent=True,
            console="off",
            host="rlhf-flows",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        ),
    )
    run.define_metric("*", step_metric="step")
    return run


def _close_wandb(run: Any, directory: Path) -> None:
    """Ends the run and leaves of its files what is to be published: not the logs, which hold this machine's paths."""
    import wandb

    run.finish()
    wandb.teardown()  # finish() returns before an offline run's file is written
    for link in [path for path in directory.iterdir() if path.is_symlink()]:  # to the newest run and to its logs
        link.unlink()
    for leftover in (*directory.glob("*/logs"), *directory.glob("*/tmp")):
        shutil.rmtree(leftover)
