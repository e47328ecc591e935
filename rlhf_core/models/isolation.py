"""Packed rows: several samples in a row, told apart by positions that restart at 0 with each of them.

Legend: R rows, L columns, n tokens of a sample.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rlhf_core.config.base import SettingsError

FLASH = "flash_attention_2"
_TOKENS = 8  # of a sample of the check: more than a convolution of a hybrid model reaches back
# Differences that rounding explains, relative to the largest output. Between equal places in rows of one forward there
# is next to none; between the first and the second place of a row sums run in another order.
_FLOAT32, _LOW = (1e-5, 1e-3), (1e-4, 2e-2)  # (behind another neighbour, in another place)


def restarts_within(position_ids: Tensor) -> bool:
    """Whether a row (of R, L) holds more than one sample."""
    return bool((position_ids[:, 1:] == 0).any())


def end_to_end(rows: Tensor) -> Tensor:
    """(R, L) -> (1, R * L). The first sample of each row then begins where a position restarts, as the others do.

    transformers' flash attention looks for restarting positions in a single row alone.
    """
    return rows.reshape(1, -1)


def check_isolation(infer: Callable[..., Any], config: PreTrainedConfig, *, float32: bool, multiple: int = 1) -> None:
    """Raises SettingsError for a model whose outputs for a packed sample depend on what stands before it in its row.

    A sample stands in four rows of one micro-batch: twice behind the same one, behind another one, and as the first,
    where a causal model sees nothing but it. Every rank calls this.

    Args:
        infer: the model's forward on input_ids and position_ids, (R, L, ...).
        float32: whether the model computes in float32.
        multiple: of which L has to be one.
    """
    count = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    sample, one, other = torch.randint(count, (3, _TOKENS * multiple), generator=generator)
    n = len(sample)
    rows = [(one, sample), (one, sample), (other, sample), (sample, one)]
    outputs = infer(
        input_ids=torch.stack([torch.cat(row) for row in rows]), position_ids=torch.arange(n).repeat(len(rows), 2)
    ).float()
    first, again, neighbour = outputs[:3, n:]
    noise, leak, shift = (float((first - o).abs().max()) for o in (again, neighbour, outputs[3, :n]))
    by_neighbour, by_place = (share * float(outputs.abs().max()) for share in (_FLOAT32 if float32 else _LOW))
    # Kernels whose sums run in any order differ between equal rows, too.
    if not (leak <= by_neighbour + 10 * noise and shift <= by_place + 10 * noise):
        raise SettingsError(
            f"trainer.packing true: models of type {config.model_type} do not keep the samples of a row apart (outputs "
            f"differ by {max(leak, shift):.2g}); set trainer.packing false"
        )
