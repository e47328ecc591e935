"""Does each preset of RL learn? From the demo's SFT policies of seeds 0, 1, 2, rewarded by the truth alone.

    make bench                                       (27 runs, about an hour on two cores)
    python tests/benchmarks/presets.py --presets grpo --seeds 0 --store DIRECTORY

Runs are those of the stage `ppo` by its driver, without a server. Writes docs/measurements/presets.md and its plots.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, get_args

from cases import MEASUREMENTS, write_measurement
from chains import STORE, curve, number, percent, run_chain

from rlhf_core.config.algorithm import Preset
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.tracking.plots import plot_curves

PRESETS: tuple[str, ...] = get_args(Preset)
WANTED = 10.0  # points, in the median of the seeds

# What all runs have in common, and where a preset's differ: chosen on seed 4, which is not measured. The average of the
# weights and the low temperature are for the shortness of the runs: both take noise out of so few steps.
COMMON = [
    "rm=null",
    "evaluate=null",
    "data.pairs=null",
    "data.steps=null",
    "ppo.reward={exact: 1.0}",
    "ppo.rollout.samples_per_prompt=8",
    "ppo.rollout.temperature=0.5",
    "ppo.optimizer.lr=2.0e-4",
    "ppo.steps=40",
    "ppo.epochs=1",
    "ppo.eval_steps=20",
    "ppo.ema_decay=0.95",
    "ppo.trainer={ranks: 1, zero_stage: 2, micro_batch_size: 128, save_steps: null}",
]
# A KL holds noise back as well: without one the learning rate is lower, the more so where deviations of groups whose
# responses are almost all alike are scaled up.
OWN: dict[str, list[str]] = {
    "ppo": ["ppo.critic.init=policy", "ppo.critic.warmup_steps=2", "ppo.steps=60"],
    "reinforce_pp_baseline": ["ppo.optimizer.lr=1.5e-4"],
    "dr_grpo": ["ppo.optimizer.lr=1.5e-4"],
    "dapo": ["ppo.optimizer.lr=1.0e-4"],
    "gspo": ["ppo.steps=60"],
    "cispo": ["ppo.optimizer.lr=7.0e-5", "ppo.steps=60"],
}

Results = dict[str, dict[int, Manifest]]  # preset -> seed -> what its run left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", default=str(STORE))
    parser.add_argument("--set", action="append", default=[], help="a dotted override for every run")
    given = parser.parse_args()
    results: Results = {preset: {} for preset in given.presets}
    for seed in given.seeds:  # a seed of all presets before the next: a benchmark that is stopped has compared them
        for preset in given.presets:
            overrides = [*overrides_of(preset), *given.set]
            results[preset][seed] = run_chain(seed, preset, given.store, overrides, last="ppo")["ppo"]
    write_measurement("presets", report(results, Store(given.store)))


def overrides_of(preset: str) -> list[str]:
    critic = [] if preset == "ppo" else ["ppo.critic=null"]
    return [*COMMON, f"ppo.algorithm={{preset: {preset}}}", *critic, *OWN.get(preset, [])]


def gain(run: Manifest) -> float:
    """Points of greedy exact match on the held-out problems."""
    return 100 * (number(run.metrics["exact_match/last"]) - number(run.metrics["exact_match/first"]))


def report(results: Results, store: Store) -> list[str]:
    lines = [
        "# What each preset learns",
        "",
        f"Written by `{' '.join(['python tests/benchmarks/presets.py', *sys.argv[1:]])}` (`make bench` runs it whole): "
        "the SFT policies of deployments/pipelines/demo.yaml, of each seed, trained on reward `exact` alone; greedy "
        "exact match on all held-out problems before and after. Settings are those of the benchmark's file, "
        "chosen on another seed; what a preset fills is untouched. Two CPU cores, seconds while other work ran; parity "
        "is the largest difference between a log-prob of the sampler and the trainer's.",
        "",
        "| preset | learning rate | steps | before -> after, by seed | gains, points | median | s a run | parity |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for preset, runs in results.items():
        gains = [gain(run) for run in runs.values()]
        ends = ", ".join(
            f"{percent(run.metrics['exact_match/first'])} -> {percent(run.metrics['exact_match/last'])}"
            for run in runs.values()
        )
        seconds = statistics.median(number(run.wall_seconds) for run in runs.values())
        parity = max(number(run.metrics["parity/max"]) for run in runs.values())
        settings: Any = next(iter(runs.values())).key_source["settings"]
        lines.append(
            f"| {preset} | {settings['optimizer']['lr']:g} | {settings['steps']} | {ends} "
            f"| {', '.join(f'{one:+.1f}' for one in gains)} | {statistics.median(gains):+.1f} "
            f"| {seconds:.0f} | {parity:.0e} |"
        )
    reached = sum(statistics.median(map(gain, runs.values())) >= WANTED for runs in results.values())
    lines += ["", f"{reached} of {len(results)} presets gain at least {WANTED:g} points in the median.", ""]
    for preset, runs in results.items():
        plot = MEASUREMENTS / f"presets-{preset}.png"
        draw(plot, preset, runs, store)
        lines.append(f"![{preset}]({plot.name})")
    return lines


def draw(path: Path, preset: str, runs: dict[int, Manifest], store: Store) -> None:
    """Greedy on held-out problems, and the mean reward of what is sampled for training."""
    curves = {f"greedy, held out, seed {seed}": curve(run, store, "eval", "exact_match") for seed, run in runs.items()}
    curves |= {f"sampled, seed {seed}": curve(run, store, "train", "reward") for seed, run in runs.items()}
    plot_curves(path, f"{preset}: exact match", curves)


if __name__ == "__main__":
    main()
