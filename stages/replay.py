"""Trains again on the rollouts that a run of ppo kept, without a sampler: `rlhf replay`."""

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.base import SettingsError, parse_settings
from rlhf_core.config.pipeline import ClusterSettings, TrackingSettings, apply_overrides
from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.dump import RolloutDump
from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.keys import directory_digest
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
    settings = _changed(run, overrides)
    published = read_manifest(store, STAGE, dump.key)
    if steps is None:
        exported: Any = published.metrics["exported_step"] if published is not None else max(dump.steps(), default=0)
        steps = int(exported)
    _check_steps(dump, steps, settings)
    if out.exists() and any(out.iterdir()):
        raise StoreError(f"{out} is not empty; give a new directory")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlhf-replay-") as scratch:
        job = Job(
            stage=STAGE,
            key=f"replay-{dump.key}",
            settings=settings,
            store_url=store.url,
            lease=0,  # nothing is saved
            scratch=scratch,
            manifests={name: Manifest.model_validate(one) for name, one in run["inputs"].items()},
            tokens=run["tokens"],
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


def _changed(run: dict[str, Any], overrides: Iterable[str]) -> PpoSettings:
    """The run's settings with the overrides. Raises SettingsError for one that the rollouts depend on."""
    changed = apply_overrides({STAGE: run["settings"]}, overrides)
    others = sorted(changed.keys() - {STAGE})
    if others:
        raise SettingsError(f"set: {', '.join(others)} is no setting of a replay; give those of {STAGE}")
    before = parse_settings(PpoSettings, run["settings"], STAGE)
    after = parse_settings(PpoSettings, changed[STAGE], STAGE)
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
            f"not among them; give --steps a number up to the first that is missing"
        )
    if steps > settings.steps:
        raise SettingsError(f"{STAGE}.steps is {settings.steps}, and {steps} rollouts are to be trained on; raise it")
