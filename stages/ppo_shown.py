"""What the stage ppo shows of a run: plots, tables, the summary."""

from pathlib import Path
from typing import Any

from rlhf_core.data.rows import write_jsonl
from rlhf_core.tracking.history import History, markdown_table

COLUMNS = 4  # evaluations in the summary's table of generations: the first, the last and some between


def write_shown(files: Path, history: History) -> None:
    """Plots, samples.jsonl and generations.jsonl of the artifact."""
    write_plots(files, history)
    write_jsonl(files / "samples.jsonl", history.samples)
    write_jsonl(files / "generations.jsonl", history.generations)


def write_plots(files: Path, history: History) -> None:
    from rlhf_core.tracking.plots import plot_bands, plot_curves
    from rlhf_core.training.rl_metrics import DECILES

    rewards = {
        "reward": history.curve("reward"),
        "reward model (normalised)": history.curve("reward/rm"),
        "process reward model": history.curve("reward/prm"),
        "exact match (sampled)": history.curve("reward/exact"),
        "exact match (greedy, held out)": history.curve("exact_match", "eval"),
    }
    measured = {label: curve for label, curve in rewards.items() if curve[0]}
    plot_curves(files / "plots" / "reward.png", "PPO: reward of the rollouts", measured)
    steps, _ = history.curve("reward_percentile/50")
    bands = [history.curve(f"reward_percentile/{at}")[1] for at in DECILES]
    plot_bands(files / "plots" / "reward_percentiles.png", "PPO: rewards of each rollout, by tenths", steps, bands)
    title = "PPO: KL from the reference, per token"
    curves = {"k1": history.curve("kl"), "sampler against trainer, k3": history.curve("mismatch/kl")}
    plot_curves(files / "plots" / "kl.png", title, {label: curve for label, curve in curves.items() if curve[0]})


def summary(measured: dict[str, Any], generations: list[dict[str, Any]]) -> str:
    rows = [
        ("greedy exact match, held out", "exact_match"),
        ("reward", "reward"),
        ("reward model, normalised", "reward/rm"),
        ("process reward model", "reward/prm"),
        ("exact match, sampled", "reward/exact"),
    ]
    table = "\n".join(
        f"| {what} | {measured[f'{name}/first']:.3f} | {measured[f'{name}/last']:.3f} |"
        for what, name in rows
        if f"{name}/first" in measured
    )
    first = f"**PPO**: {measured['steps']} steps. Sampler and trainer log-probs differ by at most "
    scores = f"| | first | last |\n|---|---|---|\n{table}\n"
    return f"{first}{measured['parity/max']:.1e}.\n\n{scores}\n{generations_table(generations)}"


def generations_table(generations: list[dict[str, Any]]) -> str:
    """Markdown: a prompt a row, its greedy response at some of the evaluations a column; nothing without any."""
    steps = list(dict.fromkeys(row["step"] for row in generations))
    if not steps:
        return ""
    last = len(steps) - 1
    chosen = list(dict.fromkeys(steps[n * last // (COLUMNS - 1)] for n in range(COLUMNS)))
    answered = [[_answer(row) for row in generations if row["step"] == step] for step in chosen]
    asked = [[row["prompt"], row["label"]] for row in generations if row["step"] == steps[0]]
    rows = [[*prompt, *answers] for prompt, *answers in zip(asked, *answered, strict=True)]
    return markdown_table(["prompt", "answer", *(f"step {step}" for step in chosen)], rows)


def _answer(row: dict[str, Any]) -> str:
    return f"{'✓' if row['score'] >= 1 else '✗'} {row['response']}"
