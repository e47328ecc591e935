"""What several samples of a problem say: pass@k, mean@n, majority."""

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of k samples is right, unbiased from `samples` of which `right` were.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    Raises ValueError for k outside 1..n or c outside 0..n.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right; k is 1 to {samples}, right 0 to {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[str], scores: Sequence[float]) -> float:
    """The score of the answer given most often, the earliest of equals (self-consistency: Wang et al. 2022)."""
    return scores[answers.index(Counter(answers).most_common(1)[0][0])]
