"""Loss of the reward model."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def pairwise_sigmoid_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected), for each pair (Bradley-Terry; Ouyang et al. 2022, eq. 1).

    chosen, rejected: (pairs,) scores. Returns (pairs,) losses in float32.
    """
    return -logsigmoid(chosen.float() - rejected.float())
