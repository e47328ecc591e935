"""Peak memory of a stage's driver while it makes tokens of its rows: as they come from the file, and all at once.

`python tests/benchmarks/token_memory.py` measures each in a process of its own (a minute on two cores), and writes
docs/measurements/token_memory.md. It fails where one by one the peak grows by more than a quarter of what it grows by
all at once.
"""

import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cases import write_measurement

ROWS = (2_000, 16_000)
WORDS = 120  # of a response; characters are tokens of the demo's tokenizer
LARGEST_SHARE = 0.25


def rows(count: int) -> Iterable[dict[str, str]]:
    return ({"prompt": f"{number} + {number}?", "response": "1 2 3 + " * WORDS} for number in range(count))


def measure(way: str, path: Path, folder: Path, answer: Any) -> None:
    """Sends the peak resident memory above that before the rows, MiB."""
    from rlhf_core.config.supervised import TextSettings
    from rlhf_core.data.encode import Encoder
    from rlhf_core.data.rows import read_jsonl, stream_jsonl
    from rlhf_core.data.token_cache import cached_tokens
    from rlhf_core.models.scratch import build_tokenizer
    from rlhf_core.store.store import Store

    encoder = Encoder(build_tokenizer(2048), TextSettings(), 2048)
    encoder.sft(rows(10))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "one by one":
        cached_tokens(
            Store(str(folder / "store")),
            "0" * 64,
            folder / "tokens",
            lambda sink: encoder.sft(stream_jsonl(path), into=sink).report,
        )
    else:
        encoder.sft(read_jsonl(path))
    answer.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measured(way: str, count: int) -> float:
    from rlhf_core.data.rows import write_jsonl

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="rlhf-tokens-") as name:
        write_jsonl(Path(name) / "rows.jsonl", rows(count))
        process = context.Process(target=measure, args=(way, Path(name) / "rows.jsonl", Path(name), theirs))
        process.start()
        theirs.close()
        try:
            return ours.recv()
        finally:
            process.join()


def main() -> None:
    peaks = {way: [measured(way, count) for count in ROWS] for way in ("one by one", "all at once")}
    lines = [
        "# Memory while rows become tokens",
        "",
        f"`python tests/benchmarks/token_memory.py`: rows of {8 * WORDS} characters and as many tokens; peak resident "
        "memory above that of the process before it reads them, MiB. All at once: the rows as a list, the items too.",
        "",
        f"| way | {' | '.join(f'{count} rows' for count in ROWS)} |",
        "|---" * (1 + len(ROWS)) + "|",
        *(f"| {way} | {' | '.join(f'{peak:.0f}' for peak in found)} |" for way, found in peaks.items()),
    ]
    write_measurement("token_memory", lines)
    grown = {way: found[1] - found[0] for way, found in peaks.items()}
    if grown["one by one"] > LARGEST_SHARE * grown["all at once"]:
        sys.exit(
            f"one by one the peak grew by {grown['one by one']:.0f} MiB, all at once by {grown['all at once']:.0f}"
        )


if __name__ == "__main__":
    main()
