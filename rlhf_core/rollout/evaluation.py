"""What several samples of each held-out prompt measure."""

from collections.abc import Sequence

import numpy as np

from rlhf_core.algorithms.pass_at_k import majority, pass_at_k


def sampled_metrics(samples: Sequence[Sequence[tuple[float, str]]], ks: Sequence[int]) -> dict[str, float]:
    """Means over prompts of pass@k (unbiased), mean@n and majority@n.

    samples: for each prompt its n samples, (score, text). Right is a score of at least 1; the majority is that of
    equal texts, and its score counts.
    """
    n = len(samples[0])
    right = [sum(score >= 1.0 for score, _ in own) for own in samples]
    return {
        f"mean@{n}": float(np.mean([score for own in samples for score, _ in own])),
        f"majority@{n}": float(np.mean([majority([t for _, t in own], [s for s, _ in own]) for own in samples])),
        **{f"pass@{k}": float(np.mean([pass_at_k(n, c, k) for c in right])) for k in ks},
    }
