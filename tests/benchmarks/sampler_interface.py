"""Which vLLM interface gives the same bits twice: one LLMEngine stepped by its owner, or AsyncLLM?

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/sampler_interface.py [float32 | bfloat16]

Each line: two processes, one after the other, each with an engine that is asked three times for the same 64 samples (64
prompts, 32 tokens, a seed each). A result is the SHA-256 over token ids and raw float32 log-probs. The AsyncLLM rows
submit all requests in id order; "staggered" waits a millisecond between them, as requests that arrive one by one do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPTS, NEW_TOKENS, VOCAB = 64, 32, 512
INTERFACES = ("engine", "async", "async-staggered")


def make_model(directory: Path) -> None:
    """A random Llama (hidden 128, 2 layers, 4 heads, 2 key-value heads, tied head), fp32 on disk."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def prompts() -> list[list[int]]:
    import random

    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB) for _ in range(4 + i % 13)] for i in range(PROMPTS)]


def engine_args(model: str, dtype: str) -> dict:
    return {
        "model": model,
        "dtype": dtype,
        "seed": 0,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 64,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 1 << 28,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
    }


def params(index: int):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        seed=1000 + index,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def digest(outputs: dict[int, object]) -> str:
    import numpy as np

    sha = hashlib.sha256()
    for index in sorted(outputs):
        completion = outputs[index].outputs[0]
        sha.update(np.asarray(completion.token_ids, dtype=np.int64).tobytes())
        logprobs = completion.logprobs
        sha.update(np.asarray([logprobs.logprobs[i] for i in logprobs.start_indices], dtype=np.float32).tobytes())
    return sha.hexdigest()[:12]


def run_engine(model: str, dtype: str) -> list[tuple[str, float]]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(model, dtype)))
    results = []
    for _ in range(3):
        start = time.perf_counter()
        engine.reset_prefix_cache()
        for index, prompt in enumerate(prompts()):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params(index))
        outputs = {}
        while engine.has_unfinished_requests():
            outputs.update({int(o.request_id): o for o in engine.step() if o.finished})
        results.append((digest(outputs), time.perf_counter() - start))
    return results


async def run_async(model: str, dtype: str, *, staggered: bool) -> list[tuple[str, float]]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(model, dtype)))

    async def one(index: int, prompt: list[int]):
        async for output in engine.generate({"prompt_token_ids": prompt}, params(index), str(index)):
            last = output
        return index, last

    results = []
    for _ in range(3):
        start = time.perf_counter()
        await engine.reset_prefix_cache()
        tasks = []
        for index, prompt in enumerate(prompts()):
            tasks.append(asyncio.create_task(one(index, prompt)))
            if staggered:
                await asyncio.sleep(0.001)
        results.append((digest(dict(await asyncio.gather(*tasks))), time.perf_counter() - start))
    engine.shutdown()
    return results


def child(interface: str, model: str, dtype: str) -> None:
    start = time.perf_counter()
    if interface == "engine":
        results = run_engine(model, dtype)
    else:
        results = asyncio.run(run_async(model, dtype, staggered=interface == "async-staggered"))
    total = time.perf_counter() - start
    rss = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
    print("RESULT " + json.dumps({"digests": [d for d, _ in results], "seconds": [s for _, s in results],
                                  "start_up": total - sum(s for _, s in results), "rss_gib": rss}))  # fmt: skip


def main() -> None:
    if len(sys.argv) == 4:
        child(*sys.argv[1:])
        return
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for dtype in sys.argv[1:] or ("float32", "bfloat16"):
            for interface in INTERFACES:
                environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if interface == "engine" else "1"
                found, rows = set(), []
                for _ in range(2):
                    done = subprocess.run(
                        [sys.executable, __file__, interface, folder, dtype],
                        env=environment, capture_output=True, text=True, check=False, timeout=300,
                    )  # fmt: skip
                    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                    if not lines:
                        raise SystemExit(f"{interface} {dtype} failed:\n{done.stderr[-3000:]}")
                    rows.append(json.loads(lines[0][7:]))
                    found.update(rows[-1]["digests"])
                tokens = PROMPTS * NEW_TOKENS / min(s for row in rows for s in row["seconds"])
                start_up = min(row["start_up"] for row in rows)
                rss = max(row["rss_gib"] for row in rows)
                print(
                    f"{dtype:9} {interface:16} distinct results of 6: {len(found)} {sorted(found)}  "
                    f"start-up {start_up:.1f} s  {tokens:.0f} tok/s  peak RSS {rss:.2f} GiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
