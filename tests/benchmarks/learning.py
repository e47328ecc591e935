"""Does the demo learn? The chain for seeds 0, 1, 2 with the demo's reward, and PPO again with the reward model alone;
then a few steps of PPO in bfloat16, for how far sampler and trainer are apart.

    make bench                     (all of it, about half an hour on two cores; writes docs/learning.md and its plots)
    python tests/benchmarks/learning.py --seeds 0 --store DIRECTORY

Stages run one after another through their drivers, without a server. What the store has is reused, so that a run that
was stopped goes on.
"""

import argparse
import statistics
import sys
from pathlib import Path

from chains import PROJECT, STORE, draw_truth, number, percent, run_chain

from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store

REWARDS = {"demo": [], "rm-only": ["ppo.reward={rm: 1.0, exact: 0.0}"]}
BF16 = ["ppo.dtype=bfloat16", "ppo.sampler.dtype=bfloat16", "ppo.steps=20"]
BF16_MEAN = 0.02  # the bound that the mean difference of log-probs has to keep in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--rm-only-seeds", type=int, nargs="*", help="seeds of the runs with the RM alone; all by default"
    )
    parser.add_argument("--store", default=str(STORE))
    parser.add_argument("--set", action="append", default=[], help="a dotted override for every run")
    parser.add_argument("--docs", default=str(PROJECT / "docs"), help="where learning.md and its plots go")
    arguments = parser.parse_args()
    rm_only = arguments.seeds if arguments.rm_only_seeds is None else arguments.rm_only_seeds
    results = {
        (seed, reward): run_chain(seed, reward, arguments.store, [*REWARDS[reward], *arguments.set])
        for reward, seeds in (("demo", arguments.seeds), ("rm-only", rm_only))
        for seed in seeds
    }
    bf16 = run_chain(arguments.seeds[0], "bf16", arguments.store, [*BF16, *arguments.set], last="ppo")["ppo"]
    write_docs(Path(arguments.docs), results, bf16, Store(arguments.store))


def write_docs(docs: Path, results: dict[tuple[int, str], dict[str, Manifest]], bf16: Manifest, store: Store) -> None:
    lines = [
        "# What the demo learns",
        "",
        f"Written by `python tests/benchmarks/learning.py {' '.join(sys.argv[1:])}` (`make bench` runs it whole). "
        "Greedy exact match on the held-out problems of deployments/pipelines/demo.yaml; RM accuracy on its held-out "
        "pairs; two CPU cores, seconds while other work ran.",
        "",
        "| reward | seed | after SFT | RM accuracy | after PPO | gain, points | PPO, s | largest log-prob difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (seed, reward), made in results.items():
        evaluation, rm, ppo = made["evaluate"].metrics, made["rm"].metrics, made["ppo"]
        lines.append(
            f"| {reward} | {seed} | {percent(evaluation['exact_match/sft'])} | {percent(rm['eval/accuracy'])} "
            f"| {percent(evaluation['exact_match/ppo'])} | {100 * number(evaluation['gain']):+.1f} "
            f"| {ppo.wall_seconds:.0f} | {number(ppo.metrics['parity/max']):.1e} |"
        )
    lines.append("")
    for reward in REWARDS:
        chains = {seed: made for (seed, name), made in results.items() if name == reward}
        if not chains:
            continue
        gains = [100 * number(made["evaluate"].metrics["gain"]) for made in chains.values()]
        lines.append(f"{reward}: median gain {statistics.median(gains):+.1f} points, smallest {min(gains):+.1f}.")
        plot = docs / f"learning-{reward}.png"
        draw_truth(plot, f"PPO with reward: {reward}", {seed: made["ppo"] for seed, made in chains.items()}, store)
        lines += ["", f"![{reward}]({plot.name})", ""]
    mean, largest = number(bf16.metrics["parity/mean"]), number(bf16.metrics["parity/max"])
    kept = "kept" if mean < BF16_MEAN else "NOT KEPT"
    lines += [
        f"In bfloat16 (trainer and sampler, {bf16.metrics['steps']} steps of PPO) their log-probs of the same tokens "
        f"differ by {mean:.4f} in the mean of the worst step (bound {BF16_MEAN}: {kept}) and by at most {largest:.3f}.",
        "",
    ]
    docs.mkdir(exist_ok=True)
    (docs / "learning.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
