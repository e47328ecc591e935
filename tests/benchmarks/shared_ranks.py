"""Does an optimizer step depend on it if two ranks share each layer or each sequence, and two such pairs the batch?

Four ranks, tensor or sequence parallel 2 x data parallel 2, x ZeRO 1, 2, 3 x micro-batch 1, 4, for SFT, RM, PRM, DPO
and KTO, and for SFT with adapters under sequence parallelism, against plain PyTorch in float32.

    make bench                                           (66 cases, about two minutes on two cores)
    python tests/benchmarks/shared_ranks.py --kinds sft

A finished case is in .rlhf/bench/shared_ranks.jsonl and is not run again while the sources stay as they are. Writes
docs/measurements/shared_ranks.md.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# The modules of the tests are found through sys.path, which is set below.

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # before torch is imported, here and in the ranks
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rlhf_core" / "training"))
import torch
from cases import BENCH, Cases, write_measurement
from conftest import make_llama, make_scorer
from cut_kinds import BOUND, ITEMS, KINDS, cut_step, errors, is_scorer, plain_step
from ranks import Ranks

RANKS = 4
SHARED = ("tensor_parallel", "sequence_parallel")


def cuts(name: str) -> Iterator[dict[str, Any]]:
    """LoRA is refused with tensor parallelism."""
    for shared, zero_stage, micro_batch_size in itertools.product(SHARED, (1, 2, 3), (1, 4)):
        if not (KINDS[name].lora and shared == "tensor_parallel"):
            yield {"ranks": RANKS, shared: 2, "zero_stage": zero_stage, "micro_batch_size": micro_batch_size}


def measure(cases: Cases, name: str, group: Ranks, models: dict[str, str]) -> list[dict[str, Any]]:
    """Settings and errors of every case of a kind."""
    model = models["scorer" if is_scorer(name) else "policy"]
    expected = plain_step(name, model)
    done = []
    for cut in cuts(name):
        case = {"kind": name, **cut}
        result = cases.get(case) or cases.add(case, errors(cut_step(group, name, model, cut), expected))
        done.append({**cut, **result})
    print(f"{name}: {len(done)} cases, largest error {max(one['gradient'] for one in done):.1e}", flush=True)
    return done


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Largest errors by kind, and of the gradient by what the ranks share."""
    lines = [
        "# One optimizer step on four ranks, of which two share each layer or each sequence",
        "",
        f"`{' '.join(['python tests/benchmarks/shared_ranks.py', *sys.argv[1:]])}`: {sum(map(len, results.values()))} "
        f"cases: ZeRO 1, 2, 3 and micro-batches of 1 and 4. {ITEMS} items of different lengths, in float32 through "
        f"DeepSpeed on the CPU; errors as in [cuts](cuts.md), largest of all cases; bound {BOUND:.0e}.",
        "",
        "| objective | loss | gradient, tensor parallel 2 x data 2 | gradient, sequence parallel 2 x data 2 |",
        "|---|---|---|---|",
    ]
    for name, done in results.items():
        worst = [max((one["gradient"] for one in done if shared in one), default=None) for shared in SHARED]
        gradients = " | ".join("refused" if error is None else f"{error:.1e}" for error in worst)
        lines.append(f"| {name} | {max(one['loss'] for one in done):.1e} | {gradients} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [name for name in KINDS if name != "dpo, LoRA"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = Cases(BENCH / "shared_ranks.jsonl")
    group = Ranks(RANKS)
    try:
        with tempfile.TemporaryDirectory(prefix="rlhf-shared-") as folder:
            policy = make_llama(Path(folder) / "policy", kv_heads=2)  # heads for two tensor-parallel ranks
            models = {"policy": str(policy), "scorer": str(make_scorer(Path(folder) / "scorer", str(policy)))}
            group.join()
            results = {name: measure(cases, name, group, models) for name in given.kinds}
    finally:
        group.close()
    write_measurement("shared_ranks", table(results))
    if any(max(one["gradient"], one["loss"]) > BOUND for done in results.values() for one in done):
        raise SystemExit(f"an error is above {BOUND:.0e}")


if __name__ == "__main__":
    main()
