"""Peak memory and time of log-probs at a vocabulary of 128k: in chunks, and from the logits of all tokens.

`python tests/benchmarks/logprob_memory.py` measures each way in a process of its own and writes docs/logprobs.md.
"""

import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, TOKENS = 131072, 1024, 4096
DTYPES = ("float32", "bfloat16")
DOC = Path(__file__).parents[2] / "docs" / "logprobs.md"


def measure(way: str, dtype: str, answer: Any) -> None:
    """Sends (peak memory above that of the inputs and gradients, MiB; CPU seconds; norm of the weight's gradient; mean
    log-prob)."""
    import torch
    from torch.nn import functional

    from rlhf_core.models.head import LogitTransform, TokenHead

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=getattr(torch, dtype))
    hidden = torch.randn(TOKENS, HIDDEN).to(linear.weight.dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,))
    linear.weight.grad, hidden.grad = torch.zeros_like(linear.weight), torch.zeros_like(hidden)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    if way == "chunks":
        logprobs = TokenHead.of(linear, LogitTransform())(hidden, labels=labels)
    else:
        logits = linear(hidden).float()
        logprobs = functional.log_softmax(logits, dim=-1).gather(-1, labels[:, None])[:, 0]
        del logits
    logprobs.mean().backward()
    seconds = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    answer.send((peak, seconds, linear.weight.grad.float().norm().item(), logprobs.mean().item()))


def measured(way: str, dtype: str) -> tuple[float, ...]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(way, dtype, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def main() -> None:
    lines = [
        "# Log-probs without the logits of all tokens",
        "",
        f"`python tests/benchmarks/logprob_memory.py`: {TOKENS} tokens, hidden size {HIDDEN}, vocabulary {VOCABULARY}, "
        "forward and backward, one thread, a process each. Memory is the peak beside weights, inputs and their "
        "gradients; seconds are the CPU's.",
        "",
        "| dtype | way | peak, MiB | seconds | norm of the weight's gradient | mean log-prob |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        for way in ("all logits", "chunks"):
            peak, seconds, norm, mean = measured(way, dtype)
            lines.append(f"| {dtype} | {way} | {peak:.0f} | {seconds:.1f} | {norm:.6e} | {mean:.6f} |")
            print(lines[-1], flush=True)
    DOC.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
