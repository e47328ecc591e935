"""A stage's driver, killed in the middle as by a machine's death and run again: for tests and `make bench`.

Each run is one of `python -m stages.<stage> --spec FILE`, with a small model and generated sums, in a store of its own.
Neither the store nor the scratch directory is in the key, so all runs of a stage have the same one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from logged_metrics import without_times

from flows.processes import become_subreaper, descendants, end_descendants, identify, send_signal
from rlhf_core.cluster.leftovers import ATTEMPT, attempt_name, remove_leftovers
from rlhf_core.config.base import parse_settings
from rlhf_core.config.pipeline import SECTION_DATA, PipelineSettings, read_pipeline
from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.store.artifacts import artifact_path, publish, read_manifest
from rlhf_core.store.checkpoints import newest_complete
from rlhf_core.store.leases import holder
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import EventLog, read_events
from stages.plan import SUPERVISED, PlannedStage, plan_pipeline
from stages.prepare_data import PREPARE_DATA
from stages.runner import run_stage
from stages.spec import StageSpec

DEMO = Path(__file__).resolve().parents[2] / "deployments" / "pipelines" / "demo.yaml"
STAGES = SUPERVISED
RL = ("ppo", "grpo")  # both of stage ppo
STEPS, RL_STEPS, SAVE_STEPS = 8, 5, 2
LEASE_TTL_S = 5.0  # the shortest: a driver that was killed keeps its lease for so long
LIMIT_S = 300.0  # far above what any wait here takes

# What a stage needs beside what it has in common with the others.
OWN: dict[str, dict[str, Any]] = {
    "prm": {"placeholder_token": "<|reserved_0|>", "reward_tokens": ["<|reserved_1|>", "<|reserved_2|>"]},
    "dpo": {"nll_coef": 0.2},
}

# All state that a training checkpoint of RL has to hold: critic, adapted KL, moving average, moments of rewards, a
# refreshed reference, the position in the prompts after groups were replaced.
_RL_COMMON: dict[str, Any] = {
    "optimizer": {"lr": 1e-3},
    "rollout": {"prompts": 4, "samples_per_prompt": 3, "max_new_tokens": 8, "max_prompt_len": 24},
    # A policy that has learned nothing differs in the length of what it writes.
    "reward": {"exact": 1.0, "length": {"high": 6, "weight": 0.5}},
    "steps": RL_STEPS,
    "batch_size": 6,
    "epochs": 2,
    "ema_decay": 0.7,
    "eval_steps": 4,
    "dtype": "float32",
    "sampler": {"dtype": "float32", "max_model_len": 64},
}
_RL_OWN: dict[str, dict[str, Any]] = {
    "ppo": {
        "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 1},
        "algorithm": {
            "bootstrap_truncated": True,
            "kl": {"target": 0.05, "horizon": 50},
            "shaping": {"normalise": True},
        },
    },
    "grpo": {
        "algorithm": {
            "preset": "grpo",
            "kl": {"target": 0.05, "horizon": 50, "refresh_steps": 2},
            "shaping": {"normalise": True},
            "dynamic_sampling": {"enabled": True, "max_rounds": 2},
            "mismatch": {"level": "token", "mode": "clip", "low": 0.0, "high": 2.0},
            "entropy_coef": 0.001,
        },
    },
}


def write_demo_model(directory: Path) -> Path:
    """The small Llama that the demo makes from scratch."""
    return write_scratch_model(directory, **read_pipeline(DEMO)["sft"]["model"]["scratch"], seed=0)


def steps_of(trial: str) -> int:
    return RL_STEPS if trial in RL else STEPS


def settings_of(trial: str, ranks: int, model: Path, directory: Path) -> PipelineSettings:
    """A supervised stage alone, or an algorithm of RL behind an SFT stage that is not run (see `StageRun.prepare`)."""
    run = {"store": str(directory / "store"), "scratch": str(directory / "scratch"), "lease_ttl_s": LEASE_TTL_S}
    sections = (_rl_sections if trial in RL else _supervised_sections)(trial, ranks, model)
    return parse_settings(PipelineSettings, {"run": run, **sections})


def _rl_sections(algorithm: str, ranks: int, model: Path) -> dict[str, Any]:
    rows = {"sft": 1, "prompts": 24, "eval": 6}
    sft = {"model": {"path": str(model)}, "optimizer": {"lr": 1e-3}, "batch_size": 1, "max_len": 48, "max_steps": 1}
    trainer = {"ranks": ranks, "zero_stage": 2, "micro_batch_size": 3, "packing": True, "save_steps": SAVE_STEPS}
    return {
        "data": {name: {"arithmetic": {"rows": count}} for name, count in rows.items()},
        "sft": sft,
        "ppo": {**_RL_COMMON, **_RL_OWN[algorithm], "trainer": trainer},
    }


def _supervised_sections(stage: str, ranks: int, model: Path) -> dict[str, Any]:
    """56 rows in steps of 16, so that the last of 8 steps is in the third epoch."""
    (kind,) = SECTION_DATA[stage]
    section = {
        "model": {"path": str(model)},
        "optimizer": {"lr": 1e-3},
        "batch_size": 16,
        "max_len": 48,
        "max_steps": STEPS,
        "eval_steps": 4,
        "dtype": "float32",
        "trainer": {"ranks": ranks, "zero_stage": 2, "micro_batch_size": 4, "save_steps": SAVE_STEPS},
        **OWN.get(stage, {}),
    }
    return {"data": {kind: {"arithmetic": {"rows": 56, "eval_rows": 12}}}, stage: section}


@dataclass
class StageRun:
    """A stage in a store below `directory`, its inputs published there, and what its drivers do."""

    directory: Path
    planned: PlannedStage
    spec: StageSpec

    @classmethod
    def prepare(cls, directory: Path, trial: str, ranks: int, model: Path) -> "StageRun":
        """Data is made; what SFT is to make of `model` is `model` itself, without training."""
        settings = settings_of(trial, ranks, model, directory)
        *before, planned = plan_pipeline(settings)
        made: dict[str, Manifest] = {}
        for one in before:
            inputs = {name: made[node] for name, node in one.inputs.items()}
            make = _made_data if one.stage is PREPARE_DATA else partial(_untrained, model=model)
            made[one.node] = make(_spec(one, settings, inputs, directory / one.node))
        inputs = {name: made[node] for name, node in planned.inputs.items()}
        spec = _spec(planned, settings, inputs, directory / "attempt")
        (directory / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
        return cls(directory, planned, spec)

    @property
    def store(self) -> Store:
        return Store(self.spec.run.store)

    @property
    def attempt(self) -> str:
        """The name of what a driver leaves outside its scratch directory when it is killed."""
        return attempt_name(Path(self.spec.scratch))

    def events(self) -> list[dict[str, Any]]:
        """Of the newest driver."""
        return list(read_events(Path(self.spec.scratch) / "events.jsonl"))

    def start(self) -> subprocess.Popen[bytes]:
        Path(self.spec.scratch, "events.jsonl").unlink(missing_ok=True)  # of a driver before it
        command = [sys.executable, "-m", self.planned.stage.module, "--spec", str(self.directory / "spec.json")]
        with (self.directory / "driver.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, ATTEMPT: self.attempt},
                start_new_session=True,
            )

    def run(self) -> Manifest:
        """A driver to its end; the published artifact."""
        before = _living()
        driver = self.start()
        try:
            code = driver.wait(LIMIT_S)
        finally:
            _sweep(before, self.attempt)
        manifest = read_manifest(self.store, self.spec.stage, self.spec.key)
        if code != 0 or manifest is None:
            raise RuntimeError(f"{self.spec.stage} ended with {code}: {self._log_end()}")
        return manifest

    def run_here(self) -> Manifest:
        """The stage in this process."""
        scratch = Path(self.spec.scratch)
        return run_stage(self.planned.stage, self.spec, scratch, EventLog(scratch / "events.jsonl"))

    def run_and_kill(self, step: int, pause_s: float = 0.0) -> int | None:
        """A driver, killed with all that it started `pause_s` after `step`; the step of its newest whole checkpoint."""
        before = _living()
        driver = self.start()
        try:
            wait_until(lambda: driver.poll() is not None or self._steps_done() >= step)
            time.sleep(pause_s)
            if driver.poll() is None:
                kill_tree(driver.pid)
                driver.wait()
        finally:
            _sweep(before, self.attempt)
        if read_manifest(self.store, self.spec.stage, self.spec.key) is not None or self._steps_done() < step:
            raise RuntimeError(f"{self.spec.stage} was not killed after step {step}: {self._log_end()}")
        checkpoint, _ = newest_complete(self.store, self.spec.stage, self.spec.key)
        return None if checkpoint is None else checkpoint.step

    def wait_for_lease(self) -> None:
        """Until the lease of a killed driver has expired."""

        def expired() -> bool:
            lease = holder(self.store, self.spec.stage, self.spec.key)
            return lease is None or not lease.alive

        wait_until(expired)

    def resumed_at(self) -> list[int]:
        """The step of each training checkpoint that the newest driver went on from: one or none."""
        return [event["step"] for event in self.events() if event.get("name") == "resumed"]

    def metrics(self, manifest: Manifest) -> list[dict[str, Any]]:
        """All but those of time."""
        records = self.lines(manifest, "metrics.jsonl")
        return [without_times(one) for one in records]

    def lines(self, manifest: Manifest, file: str) -> list[dict[str, Any]]:
        """Of a JSONL file of the artifact."""
        path = f"{artifact_path(manifest.stage, manifest.key)}/{manifest.attempt}/{file}"
        return [json.loads(line) for line in self.store.read_bytes(path).decode().split("\n")[:-1]]

    def _steps_done(self) -> int:
        """Of training; a reference's rows are another phase."""
        return max((event["step"] for event in self.events() if event.get("phase") == "training"), default=0)

    def _log_end(self) -> str:
        return (self.directory / "driver.log").read_text(errors="replace")[-3000:]


def kill_tree(root: int) -> None:
    """SIGKILL for a process and its descendants, all at once as far as that goes."""
    for process in (identify(root), *descendants(root)):
        if process is not None:
            send_signal(process, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what is waited for did not happen")
        time.sleep(0.01)


def _spec(planned: PlannedStage, settings: PipelineSettings, inputs: dict[str, Manifest], scratch: Path) -> StageSpec:
    return StageSpec(
        stage=planned.stage.name,
        node=planned.node,
        settings=planned.settings.model_dump(mode="json"),
        key=planned.key.key,
        key_source=planned.key.source,
        inputs={name: manifest.model_dump(mode="json") for name, manifest in inputs.items()},
        run=settings.run,
        scratch=str(scratch),
    )


def _made_data(spec: StageSpec) -> Manifest:
    scratch = Path(spec.scratch)
    return run_stage(PREPARE_DATA, spec, scratch, EventLog(scratch / "events.jsonl"))


def _untrained(spec: StageSpec, model: Path) -> Manifest:
    """`model` as the artifact of a stage that trains it."""
    scratch = Path(spec.scratch)
    shutil.copytree(model, scratch / "model")
    fields = {"stage": spec.stage, "key": spec.key, "key_source": spec.key_source, "model": {}}
    return publish(Store(spec.run.store), local_dir=scratch, manifest_fields=fields, lease=None)


def _living() -> list[Any]:
    """What this process has started so far. From here on orphans among its descendants become its children."""
    become_subreaper()
    return descendants(os.getpid())


def _sweep(before: list[Any], attempt: str) -> None:
    """Ends what a driver started and outlived it, and removes what it left outside its scratch directory."""
    end_descendants(os.getpid(), 0.0, keep=before)
    remove_leftovers(attempt)
