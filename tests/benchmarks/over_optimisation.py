"""Do a policy's own answers keep PPO from over-optimising its reward model? The demo's chain with the reward model as
the only reward, for seeds 0, 1, 2: the reward model trained on the generated pairs, and on pairs of the SFT policy's
own answers, which the stage sample makes and a verifier labels.

    make bench                                                (all of it, about an hour on two cores)
    python tests/benchmarks/over_optimisation.py --seeds 0    (ten minutes for a seed and its two kinds of pairs)

Stages run one after another through their drivers, without a server. What the store has is reused, so that a run that
was stopped goes on. Writes docs/over-optimisation.md and its plots.
"""

import argparse
import statistics
import sys
from pathlib import Path

from chains import DEMO, PROJECT, STORE, curve, draw_truth, number, percent, run_chain

from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store

PIPELINES = {"generated": DEMO, "on-policy": DEMO.with_name("demo-on-policy.yaml")}
RM_ALONE = ["ppo.reward={rm: 1.0}"]

Results = dict[tuple[int, str], dict[str, Manifest]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", nargs="+", choices=list(PIPELINES), default=list(PIPELINES))
    parser.add_argument("--store", default=str(STORE))
    parser.add_argument("--set", action="append", default=[], help="a dotted override for every run")
    parser.add_argument("--docs", default=str(PROJECT / "docs"), help="where over-optimisation.md and its plots go")
    arguments = parser.parse_args()
    results = {
        (seed, pairs): run_chain(seed, pairs, arguments.store, [*RM_ALONE, *arguments.set], pipeline=PIPELINES[pairs])
        for seed in arguments.seeds
        for pairs in arguments.pairs
    }
    write_docs(Path(arguments.docs), results, Store(arguments.store))


def write_docs(docs: Path, results: Results, store: Store) -> None:
    lines = [
        "# Over-optimisation of a reward model, and pairs of the policy's own",
        "",
        f"Written by `python tests/benchmarks/over_optimisation.py {' '.join(sys.argv[1:])}` (`make bench` runs it "
        "whole). PPO of the demo with the reward model alone as reward. `generated` (demo.yaml): the reward "
        "model is trained on data.pairs, whose wrong solutions come from a generator; `on-policy` "
        "(demo-on-policy.yaml): on pairs that the "
        "[stage sample](sample.md) makes of 16 answers of the SFT policy to each training prompt, which the verifier "
        "`exact` labels. Greedy exact match on the held-out problems; two CPU cores, seconds while other work ran.",
        "",
        "| pairs | seed | pairs trained on | RM accuracy, held out | after SFT | best of PPO | after PPO | gain, points"
        " | RM score, first and last | sample, s | PPO, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row(seed, pairs, made, store) for (seed, pairs), made in results.items()),
        "",
    ]
    for pairs in PIPELINES:
        chains = {seed: made for (seed, name), made in results.items() if name == pairs}
        if not chains:
            continue
        gains = [100 * number(made["evaluate"].metrics["gain"]) for made in chains.values()]
        lines.append(f"{pairs}: median gain {statistics.median(gains):+.1f} points, smallest {min(gains):+.1f}.")
        plot = docs / f"over-optimisation-{pairs}.png"
        draw_truth(plot, f"PPO with the RM alone, {pairs} pairs", {s: made["ppo"] for s, made in chains.items()}, store)
        lines += ["", f"![{pairs}]({plot.name})", ""]
    docs.mkdir(exist_ok=True)
    (docs / "over-optimisation.md").write_text("\n".join(lines))
    print("\n".join(lines))


def row(seed: int, pairs: str, made: dict[str, Manifest], store: Store) -> str:
    evaluation, rm, ppo = made["evaluate"].metrics, made["rm"].metrics, made["ppo"]
    best = max(curve(ppo, store, "eval", "exact_match")[1])
    seconds = f"{made['sample'].wall_seconds:.0f}" if "sample" in made else ""
    return (
        f"| {pairs} | {seed} | {rm['items']} | {percent(rm['eval/accuracy'])} "
        f"| {percent(evaluation['exact_match/sft'])} | {percent(best)} "
        f"| {percent(evaluation['exact_match/ppo'])} | {100 * number(evaluation['gain']):+.1f} "
        f"| {number(ppo.metrics['reward/rm/first']):.2f}, {number(ppo.metrics['reward/rm/last']):.2f} "
        f"| {seconds} | {ppo.wall_seconds:.0f} |"
    )


if __name__ == "__main__":
    main()
