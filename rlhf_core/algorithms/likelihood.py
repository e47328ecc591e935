"""Log-likelihood of target tokens. Legend: R rows, L columns."""

from torch import Tensor

from rlhf_core.algorithms.masked import select


def weighted_logprobs(logprobs: Tensor, weights: Tensor) -> Tensor:
    """w_t * log pi(token t | tokens before it), 0 where the weight is 0 whatever stood there. Both (R, L), w >= 0."""
    return select(logprobs, weights > 0) * weights
