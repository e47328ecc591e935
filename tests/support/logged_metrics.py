"""The tables of metrics in docs/rl.md, against what a run has logged."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.rl import PpoSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rl.md"
SECTIONS = {"train": "### Each step", "eval": "### Each evaluation"}

# What stands in the column "in runs with": whether these settings have it. Of the last ones a run may have any or none.
IN_RUNS_WITH: dict[str, Callable[[PpoSettings], bool]] = {
    "": lambda s: True,
    "policy": lambda s: True,
    "critic": lambda s: s.critic is not None,
    "critic's experts": lambda s: s.critic is not None and s.critic.aux_loss_coef > 0,
    "reference": lambda s: s.algorithm.kl.coef > 0,
    "KL in the loss": lambda s: s.algorithm.kl.coef > 0 and s.algorithm.kl.place == "loss",
    "entropy bonus": lambda s: s.algorithm.entropy_coef > 0,
    "ptx": lambda s: s.ptx is not None,
    "experts": lambda s: s.aux_loss_coef > 0,
    "dynamic sampling": lambda s: s.algorithm.dynamic_sampling.enabled,
    "process reward model": lambda s: s.needs_process_model,
    "math": lambda s: s.evaluation.verifier == "math",
    "samples": lambda s: s.evaluation.samples_per_prompt > 0,
}
AT_TIMES = ("failures", "extras", "GPU")
CLOCKED = ("seconds/", "tokens_per_s/", "memory/")


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of metrics.jsonl without what no two runs share."""
    return {name: value for name, value in record.items() if not name.startswith(CLOCKED)}


def documented(phase: str) -> list[tuple[str, str]]:
    """(name, in runs with) of each metric of a phase, as the page has them."""
    section = re.split(r"^##+ ", PAGE.read_text(encoding="utf-8").split(f"{SECTIONS[phase]}\n")[1], flags=re.MULTILINE)[
        0
    ]
    rows = [[cell.strip() for cell in line.split("|")] for line in section.splitlines() if line.startswith("| `")]
    return [(name, where) for _, names, where, *_ in rows for name in re.findall(r"`([^`]+)`", names)]


def expanded(name: str, settings: PpoSettings) -> list[str]:
    """A documented name with what stands in place of <source> and the like."""
    values: dict[str, Iterable[Any]] = {
        "source": settings.reward.weights,
        "p": range(0, 101, 10),
        "n": [settings.evaluation.samples_per_prompt],
        "k": settings.evaluation.ks,
    }
    found = re.search(r"<(\w+)>", name)
    return [name] if found is None else [name.replace(found[0], str(one)) for one in values[found[1]]]


def check_logged(settings: PpoSettings, records: Iterable[Mapping[str, Any]], sources: Sequence[str] = ()) -> None:
    """Asserts that a run has logged what the page says, in each phase, and nothing else.

    sources: of held-out prompts.
    """
    logged: dict[str, set[str]] = {phase: set() for phase in SECTIONS}
    for record in records:
        logged[record["phase"]] |= record.keys() - {"step", "phase"}
    for phase, names in logged.items():
        table = documented(phase)
        wanted = {
            one
            for name, where in table
            if where not in AT_TIMES and IN_RUNS_WITH[where](settings)
            for one in expanded(name, settings)
        }
        if phase == "eval":
            wanted |= {f"{name}/{source}" for name in wanted for source in sources if not name.startswith("seconds/")}
        patterns = [re.sub(r"<\w+>", "[^/]+", name) for name, where in table if where in AT_TIMES]
        further = {name for name in names - wanted if any(re.fullmatch(pattern, name) for pattern in patterns)}
        assert names - further == wanted, f"{phase}: not in docs/rl.md or not logged: {(names - further) ^ wanted}"
