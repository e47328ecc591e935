"""Does a killed stage end in the bits of one that nobody disturbed? SFT, RM, PRM, DPO, KTO, and RL by PPO and by GRPO,
on 1 and on 2 ranks, each killed three times at a random moment, every time in a run of its own.

    make bench                                             (all 42 trials, about 50 minutes on two cores)
    python tests/benchmarks/kills.py --stages sft --ranks 1

What was finished is in .rlhf/bench/kills.jsonl and is not run again while the sources stay as they are. Writes
docs/measurements/kills.md.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "stages"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from cases import BENCH, Cases, write_measurement
from kill_trials import (  # pyright: ignore[reportMissingImports]
    RL,
    RL_STEPS,
    SAVE_STEPS,
    STAGES,
    STEPS,
    StageRun,
    steps_of,
    write_demo_model,
)

from rlhf_core.store.keys import canonical_json, sha256_text

TRIALS, SEED = 3, 7
PAUSE_S = 0.2  # up to so long after the end of a step: in the midst of the next one, or of saving

Results = dict[tuple[str, int], list[dict[str, Any]]]  # (stage, ranks) -> its trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=[*STAGES, *RL], default=[*STAGES, *RL])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    # For the drivers. The number of threads enters the bits.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    cases = Cases(BENCH / "kills.jsonl")
    results = {
        (stage, ranks): [trial(cases, stage, ranks, given.seed, number) for number in range(TRIALS)]
        for stage in given.stages
        for ranks in given.ranks
    }
    write_measurement("kills", table(results, given.seed))
    if not all(same_bits(one) for trials in results.values() for one in trials):
        raise SystemExit("a run that was killed and resumed ended in other bits than an undisturbed one")


def trial(cases: Cases, stage: str, ranks: int, seed: int, number: int) -> dict[str, Any]:
    case = {"stage": stage, "ranks": ranks, "seed": seed, "trial": number}
    result = cases.get(case)
    if result is not None:
        return result
    expected = undisturbed(cases, stage, ranks)
    draw = random.Random(canonical_json(case))
    step, pause = draw.randint(1, steps_of(stage) - 1), draw.uniform(0, PAUSE_S)
    with tempfile.TemporaryDirectory(prefix="rlhf-kills-") as folder:
        run = stage_run(Path(folder), stage, ranks)
        newest = run.run_and_kill(step, pause)
        run.wait_for_lease()
        found = run_to_the_end(run)
        resumed = run.resumed_at()
    same = {f"same {name}": found[name] == expected[name] for name in expected}
    print(f"{case}: killed after step {step}, resumed at {resumed}, {same}", flush=True)
    return cases.add(case, {"step": step, "pause": pause, "checkpoint": newest, "resumed": resumed, **same})


def undisturbed(cases: Cases, stage: str, ranks: int) -> dict[str, str]:
    case = {"stage": stage, "ranks": ranks, "trial": "undisturbed"}
    result = cases.get(case)
    if result is not None:
        return result
    with tempfile.TemporaryDirectory(prefix="rlhf-kills-") as folder:
        return cases.add(case, run_to_the_end(stage_run(Path(folder), stage, ranks)))


def stage_run(folder: Path, stage: str, ranks: int) -> StageRun:
    return StageRun.prepare(folder, stage, ranks, write_demo_model(folder / "model"))


def run_to_the_end(run: StageRun) -> dict[str, str]:
    """A driver's artifact: digests of its weights, and of its metrics, but for times, to the last digit."""
    manifest = run.run()
    metrics = sha256_text(json.dumps(run.metrics(manifest), sort_keys=True))
    return {"weights": manifest.content_digest, "metrics": metrics}


def same_bits(result: dict[str, Any]) -> bool:
    return result["same weights"] and result["same metrics"]


def table(results: Results, seed: int) -> list[str]:
    trials = [one for done in results.values() for one in done]
    same = sum(map(same_bits, trials))
    early = sum(one["checkpoint"] is None for one in trials)
    lines = [
        "# Killed and resumed",
        "",
        f"`{' '.join(['python tests/benchmarks/kills.py', *sys.argv[1:]])}`, seed {seed}: a stage's driver "
        f"(`python -m stages.<stage> --spec FILE`, the demo's small model, float32, ZeRO 2, {STEPS} steps, of "
        f"{' and '.join(RL)} {RL_STEPS}, a training checkpoint every {SAVE_STEPS}) and all its processes get SIGKILL "
        f"after a random step and up to {PAUSE_S} s more; it is run again with the same file. Weights, and metrics but "
        "for times and rates, are compared, by their digests, with those of a "
        "run that nobody disturbed.",
        "",
        f"{same} of {len(trials)} trials ended in the same bits; {early} of them were killed before the first "
        "checkpoint and started over.",
        "",
        "| stage | ranks | killed after step | went on from | same weights | same metrics |",
        "|---|---|---|---|---|---|",
    ]
    for (stage, ranks), done in results.items():
        for one in done:
            origin = ", ".join(f"step {step}" for step in one["resumed"]) or "the start"
            answers = " | ".join("yes" if one[name] else "NO" for name in ("same weights", "same metrics"))
            lines.append(f"| {stage} | {ranks} | {one['step']} + {one['pause']:.2f} s | {origin} | {answers} |")
    return lines


if __name__ == "__main__":
    main()
