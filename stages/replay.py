"""Trains again on the rollouts that a run of ppo kept, without a sampler: `rlhf replay`."""

import json
import os
import socket
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.algorithm import AlgorithmSettings
from rlhf_core.config.base import SettingsError, parse_settings
from rlhf_core.config.pipeline import ClusterSettings, TrackingSettings, apply_overrides
from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.dump import RolloutDump
from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.gc import note_inputs
from rlhf_core.store.keys import directory_digest
from rlhf_core.store.leases import acquire, keep_alive
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store, StoreError
from rlhf_core.tracking.events import EventLog
from rlhf_core.tracking.history import History
from rlhf_core.training.capabilities import check_combination
from rlhf_core.training.rank import Job
from stages.exporting import export_model
from stages.ppo import reward_mix
from stages.ppo_shown import write_plots

STAGE = "ppo"
# What a rollout depends on: other values would not be those that it was drawn with.
_DRAWN_WITH = ("policy", "rollout", "algorithm.dynamic_sampling")
_TOKENISED_WITH = ("ptx.text", "ptx.max_len")
_PRESET = f"{STAGE}.algorithm.preset"
_LEASE_TTL_S = 120.0
_WEIGHTS = ("rm", "prm", "exact", "math")


@dataclass(frozen=True)
class Replayed:
    """steps: rollouts trained on. same: whether the model is, to the bit, that of the artifact which the run published;
    None where it has published none."""

    steps: int
    model: Path
    same: bool | None


def replay(
    store: Store,
    key: str,
    out: Path,
    overrides: Iterable[str] = (),
    *,
    steps: int | None = None,
    cluster: ClusterSettings | None = None,
) -> Replayed:
    """Trains from the run's policy artifact on its rollouts; model, metrics and plots go into the new directory `out`.

    key: of the run, or its beginning. overrides: of its settings, as `ppo.algorithm.clip_high=0.3`. steps: rollouts to
    train on; None: up to the step that the run has exported, or else all that there are.

    Raises SettingsError or StoreError, before anything starts, for what cannot be replayed.
    """
    dump = RolloutDump(store, STAGE, _whole_key(store, key))
    run = dump.run()
    settings = _changed(run, list(overrides))
    published = read_manifest(store, STAGE, dump.key)
    if steps is None:
        exported: Any = published.metrics["exported_step"] if published is not None else max(dump.steps(), default=0)
        steps = int(exported)
    _check_steps(dump, steps, settings)
    if out.exists() and any(out.iterdir()):
        raise StoreError(f"{out} is not empty; give a new directory")
    tokens: dict[str, str] = run["tokens"] if settings.ptx is not None else {}
    with _in_use(store, dump.key, run), tempfile.TemporaryDirectory(prefix="rlhf-replay-") as scratch:
        _check_tokens(store, tokens)
        _check_rewards(dump, steps, parse_settings(PpoSettings, run["settings"], STAGE), settings)
        out.mkdir(parents=True, exist_ok=True)
        job = Job(
            stage=STAGE,
            key=f"replay-{dump.key}",
            settings=settings,
            store_url=store.url,
            lease=0,  # nothing is saved
            scratch=scratch,
            manifests={name: Manifest.model_validate(one) for name, one in run["inputs"].items()},
            tokens=tokens,
        )
        _train(job, dump, out, steps, cluster or ClusterSettings())
    model = out / "model"
    same = None if published is None else directory_digest(model) == published.content_digest
    return Replayed(steps, model, same)


def _train(job: Job, dump: RolloutDump, out: Path, steps: int, cluster: ClusterSettings) -> None:
    from rlhf_core.cluster.limit import start_limit
    from rlhf_core.cluster.session import ray_session
    from rlhf_core.training.rank import start_trainers
    from rlhf_core.training.rewarded import rewarded
    from rlhf_core.training.rl_metrics import Clock, rollout_metrics
    from rlhf_core.training.rl_ranks import RL_TRAINER, RlRanks

    settings: PpoSettings = job.settings
    mix = reward_mix(settings.reward, job.manifests)
    config = settings.model_dump(mode="json")
    events = EventLog(Path(job.scratch) / "events.jsonl")
    with ExitStack() as stack:
        tracking = TrackingSettings()
        history = stack.enter_context(closing(History(out, events, tracking, run_name=job.key, config=config)))
        stack.enter_context(ray_session(cluster, actors=settings.trainer.ranks))
        trainers = start_trainers(RL_TRAINER, job, settings.trainer, cluster)
        stack.callback(trainers.close)
        trainers.call("load", timeout_s=start_limit(cluster))
        ranks = RlRanks(trainers, settings)
        for step in range(1, steps + 1):
            clock = Clock()
            trajectories, about = dump.read(step)
            rollout = [rewarded(one, mix) for one in trajectories]
            clock.lap("read")
            metrics = {**rollout_metrics(rollout, version=step - 1), **about, **ranks.train(step, rollout, clock)}
            history.add(step, {**metrics, **clock.metrics()})
        export_model(trainers, out, timeout_s=start_limit(cluster))
    write_plots(out, history)


def _whole_key(store: Store, key: str) -> str:
    """The one key of a run that starts so. Raises StoreError for none or several."""
    found = [name for name in store.list_names(f"training/{STAGE}") if name.startswith(key)]
    if len(found) != 1:
        have = f"{len(found)} runs whose keys start with {key}" if found else f"no run of {STAGE} with a key {key}"
        raise StoreError(f"store {store.url} has {have}; give one whole, as the run's report has it")
    return found[0]


@contextmanager
def _in_use(store: Store, key: str, run: dict[str, Any]) -> Iterator[None]:
    """While the block runs `rlhf gc` leaves the run, what it has read, and token caches. A lease of its own: several
    may replay one run at once, and beside the stage itself."""
    name = f"{key[:12]}-{uuid.uuid4().hex}"
    lease = acquire(store, "replay", name, {"host": socket.gethostname(), "pid": os.getpid()}, _LEASE_TTL_S)
    try:
        note_inputs(store, "replay", name, sorted({key, *(one["key"] for one in run["inputs"].values())}))
        with keep_alive(lease):
            yield
    finally:
        lease.release()
        store.delete_dir(f"training/replay/{name}")


def _changed(run: dict[str, Any], overrides: list[str]) -> PpoSettings:
    """The run's settings with the overrides. Raises SettingsError for one that the rollouts depend on."""
    changed = apply_overrides({STAGE: run["settings"]}, overrides)
    others = sorted(changed.keys() - {STAGE})
    if others:
        raise SettingsError(f"set: {', '.join(others)} is no setting of a replay; give those of {STAGE}")
    before = parse_settings(PpoSettings, run["settings"], STAGE)
    after = parse_settings(PpoSettings, changed[STAGE], STAGE)
    if any(one.partition("=")[0].strip() == _PRESET for one in overrides):
        _check_preset(after.algorithm)
    if before.ptx is not None and after.ptx is not None:
        for path in _TOKENISED_WITH:
            if _at(before, path) != _at(after, path):
                raise SettingsError(f"{STAGE}.{path} is what the rows were tokenised with; run the stage to change it")
    for path in _DRAWN_WITH:
        if _at(before, path) != _at(after, path):
            raise SettingsError(f"{STAGE}.{path} is what the rollouts were drawn with; run the stage to change it")
    if _sources(before) != _sources(after):
        raise SettingsError(
            f"{STAGE}.reward: a replay can change the weights of {', '.join(before.reward.weights)}, which the run "
            "has measured, and nothing else; run the stage to change it"
        )
    for what, wanted, there in (
        ("a reward model", after.needs_reward_model, "reward" in run["inputs"]),
        ("a process reward model", after.needs_process_model, "process" in run["inputs"]),
        ("rows for ptx", after.ptx is not None, bool(run["tokens"])),
    ):
        if wanted and not there:
            raise SettingsError(f"{STAGE}: these settings need {what}, which the run did not have; run the stage")
    check_combination(after)
    return after


def _check_preset(algorithm: AlgorithmSettings) -> None:
    """Refuses a preset whose values the settings do not have: it fills what is not given, and a run gives all."""
    wanted = parse_settings(AlgorithmSettings, {"preset": algorithm.preset}, f"{STAGE}.algorithm")
    have, want = (dict(_fields(one.model_dump(mode="json"))) for one in (algorithm, wanted))
    others = [name for name in want if want[name] != have[name]]
    if others:
        # Dynamic sampling draws otherwise: no replay can set it.
        values = [
            f"{STAGE}.algorithm.{name}={json.dumps(want[name])}"
            for name in others
            if not name.startswith("dynamic_sampling.")
        ]
        instead = f" and set {', '.join(values)} instead" if values else ""
        raise SettingsError(f"{_PRESET} fills what is not given, and the run has every field; leave it out{instead}")


def _fields(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _at(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return settings


def _sources(settings: PpoSettings) -> dict[str, Any]:
    """The reward's settings but for weights and for what becomes of failures; which sources are measured."""
    given = settings.reward.model_dump(exclude={*_WEIGHTS, "on_failure", "retries", "sandbox"})
    for section in [*given.values(), *given["functions"]]:
        if isinstance(section, dict):
            section.pop("weight", None)
    return {**given, "measured": sorted(settings.reward.weights)}


def _check_steps(dump: RolloutDump, steps: int, settings: PpoSettings) -> None:
    have = dump.steps()
    missing = sorted(set(range(1, steps + 1)) - set(have))
    if missing or not steps:
        raise StoreError(
            f"the run {dump.key[:12]} has kept the rollouts of {len(have)} steps, and step {(missing or [1])[0]} is "
            f"not among them; give --steps a number below the first that is missing. A run that was resumed with "
            f"{STAGE}.dump_rollouts=true has only later ones: start one of another {STAGE}.seed with it"
        )
    if steps > settings.steps:
        raise SettingsError(f"{STAGE}.steps is {settings.steps}, and {steps} rollouts are to be trained on; raise it")


def _check_tokens(store: Store, tokens: dict[str, str]) -> None:
    for split, key in tokens.items():
        if not store.exists(f"cache/tokens/{key}/COMPLETE.json"):
            raise StoreError(
                f"store {store.url} has lost the rows of {split} as tokens, cache/tokens/{key}, which the run trained "
                f"beside; replay without them, by --set {STAGE}.ptx=null"
            )


def _check_rewards(dump: RolloutDump, steps: int, before: PpoSettings, after: PpoSettings) -> None:
    """Refuses weight for a source that failed where it had none: the run dropped no group for that, and the mix would
    take what is missing for 0."""
    weights = before.reward.weights
    raised = [name for name, weight in after.reward.weights.items() if weight and not weights[name]]
    for step in range(1, steps + 1) if raised else ():
        trajectories, _ = dump.read(step)
        for name in raised:
            failed = sum(name not in one.rewards for one in trajectories)
            if failed:
                raise SettingsError(
                    f"{STAGE}.reward: {name} had weight 0 in the run and failed for {failed} of {len(trajectories)} "
                    f"responses of step {step}, whose groups were kept; leave its weight at 0, or give --steps "
                    "a number below that step"
                )
