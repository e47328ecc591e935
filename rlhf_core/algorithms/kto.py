"""Loss of Kahneman-Tversky optimisation, for each response. Legend: N responses."""

import torch
from torch import Tensor


def kto_loss(
    log_ratios: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """w_D * (1 - sigmoid(beta * (r - z))) if desirable, else w_U * (1 - sigmoid(beta * (z - r))).

    r is the log-ratio of policy and reference, summed over the response; z = max(0, kl), without gradient
    (Ethayarajh et al. 2024, section 4). log_ratios: (N,); desirable: (N,) bool; kl: scalar, the mean log-ratio of
    mismatched prompts and responses. Returns (N,).
    """
    reference_point = kl.detach().clamp(min=0)
    gain = beta * (log_ratios - reference_point)
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where sigmoid(x) is close to 1.
    good, bad = torch.sigmoid(-gain), torch.sigmoid(gain)
    return torch.where(desirable, desirable_weight * good, undesirable_weight * bad)
