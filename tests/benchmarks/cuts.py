"""Do gradient and loss of an optimizer step depend on how it was cut? Micro-batch 1, 2, 4, 8 x ranks 1, 2 x ZeRO 0, 2,
3 x packed or not, for SFT, RM, PRM, DPO and KTO, and for SFT and DPO with adapters, against plain PyTorch in float32.

    make bench                                       (all 336 cases, about three minutes on two cores)
    python tests/benchmarks/cuts.py --kinds sft dpo

A finished case is in .rlhf/bench/cuts.jsonl and is not run again while the sources stay as they are. Writes
docs/measurements/cuts.md.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The modules of the tests are found through sys.path, which is set below.

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # before torch is imported, here and in the ranks
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rlhf_core" / "training"))
import torch
from cases import BENCH, Cases, write_measurement
from conftest import make_llama, make_scorer
from cut_kinds import BOUND, ITEMS, KINDS, cut_step, errors, is_scorer, plain_step
from ranks import Ranks

AXES: dict[str, Sequence[Any]] = {
    "micro_batch_size": [1, 2, 4, 8],
    "ranks": [1, 2],
    "zero_stage": [0, 2, 3],
    "packing": [False, True],
}


def measure(cases: Cases, name: str, groups: dict[int, Ranks], models: dict[str, str]) -> list[dict[str, Any]]:
    """The axes' values and the errors of every case of a kind."""
    model = models["scorer" if is_scorer(name) else "policy"]
    expected = plain_step(name, model)
    done = []
    for values in itertools.product(*AXES.values()):
        cut = dict(zip(AXES, values, strict=True))
        case = {"kind": name, **cut}
        result = cases.get(case) or cases.add(case, errors(cut_step(groups[cut["ranks"]], name, model, cut), expected))
        done.append({**cut, **result})
    print(f"{name}: {len(done)} cases, largest error {max(one['gradient'] for one in done):.1e}", flush=True)
    return done


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Largest errors: by kind, then of the gradient by kind and value of each axis."""
    count = sum(map(len, results.values()))
    lines = [
        "# One optimizer step, cut in every way",
        "",
        f"`{' '.join(['python tests/benchmarks/cuts.py', *sys.argv[1:]])}`: {count} cases. {ITEMS} items of different "
        "lengths, one optimizer step in float32 through DeepSpeed on the CPU, against plain PyTorch that takes one "
        "unpadded sample at a time. Gradient: L2 norm of the difference over all trained parameters, relative to the "
        f"norm of the plain gradient; loss: relative to the plain loss. Largest of all cases; bound {BOUND:.0e}.",
        "",
        "| objective | gradient | loss |",
        "|---|---|---|",
        *(
            f"| {name} | {max(one['gradient'] for one in done):.1e} | {max(one['loss'] for one in done):.1e} |"
            for name, done in results.items()
        ),
        "",
        "Largest error of the gradient by the value of each axis:",
        "",
    ]
    columns = [(axis, value) for axis, values in AXES.items() for value in values]
    titles = [f"{axis.replace('_', ' ')} {str(value).lower()}" for axis, value in columns]
    lines += [f"| objective | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for name, done in results.items():
        worst = [max(one["gradient"] for one in done if one[axis] == value) for axis, value in columns]
        lines.append(f"| {name} | {' | '.join(f'{error:.1e}' for error in worst)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = Cases(BENCH / "cuts.jsonl")
    groups = {size: Ranks(size) for size in AXES["ranks"]}
    try:
        with tempfile.TemporaryDirectory(prefix="rlhf-cuts-") as folder:
            policy = make_llama(Path(folder) / "policy")
            models = {"policy": str(policy), "scorer": str(make_scorer(Path(folder) / "scorer", str(policy)))}
            for group in groups.values():
                group.join()
            results = {name: measure(cases, name, groups, models) for name in given.kinds}
    finally:
        for group in groups.values():
            group.close()
    write_measurement("cuts", table(results))
    if any(max(one["gradient"], one["loss"]) > BOUND for done in results.values() for one in done):
        raise SystemExit(f"an error is above {BOUND:.0e}")


if __name__ == "__main__":
    main()
