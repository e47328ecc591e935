"""Do a policy's own answers keep PPO from over-optimising its reward model? The demo's chain with the reward model as
the only reward, for seeds 0, 1, 2: the reward model trained on the generated pairs, and on pairs of the SFT policy's
own answers, which the stage sample makes and a verifier labels.

    make bench                                                (all of it, about 70 minutes on two cores)
    python tests/benchmarks/over_optimisation.py --seeds 0    (a seed with both kinds of pairs)

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

PIPELINE = DEMO.with_name("demo-on-policy.yaml")
GENERATED = "data.pairs={{arithmetic: {{rows: 50000, eval_rows: 400, seed: {seed}}}}}"  # about as many as on-policy
PAIRS = ("generated", "on-policy")

Results = dict[tuple[int, str], dict[str, Manifest]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--store", default=str(STORE))
    parser.add_argument("--set", action="append", default=[], help="a dotted override for every run")
    parser.add_argument("--docs", default=str(PROJECT / "docs"), help="where over-optimisation.md and its plots go")
    arguments = parser.parse_args()
    results = {
        (seed, pairs): run_chain(
            seed, pairs, arguments.store, [*overrides(pairs, seed), *arguments.set], pipeline=PIPELINE
        )
        for seed in arguments.seeds
        for pairs in arguments.pairs
    }
    write_docs(Path(arguments.docs), results, Store(arguments.store))


def overrides(pairs: str, seed: int) -> list[str]:
    """Both kinds of pairs with the same SFT policy, and as long training of reward model and PPO."""
    return [GENERATED.format(seed=seed), "rm.pairs=data", "sample=null"] if pairs == "generated" else []


def write_docs(docs: Path, results: Results, store: Store) -> None:
    lines = [
        "# Over-optimisation of a reward model, and pairs of the policy's own",
        "",
        f"Written by `python tests/benchmarks/over_optimisation.py {' '.join(sys.argv[1:])}` (`make bench` runs it "
        "whole). deployments/pipelines/demo-on-policy.yaml: PPO with the reward model alone as reward. `on-policy`: "
        "the reward model is trained on pairs that the [stage sample](sample.md) makes of 64 answers of the SFT policy "
        "to each training prompt, which the verifier `exact` labels; `generated`: on about as many pairs of "
        "data.pairs, whose wrong solutions a generator invents. RM accuracy on held-out pairs of their own kind; "
        "greedy exact match on the held-out problems; two CPU cores, seconds while other work ran.",
        "",
        "| pairs | seed | pairs trained on | RM accuracy, held out | after SFT | best of PPO | after PPO | gain, points"
        " | RM score, first and last | sample, s | PPO, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row(seed, pairs, made, store) for (seed, pairs), made in results.items()),
        "",
    ]
    for pairs in PAIRS:
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
