"""Sequence parallelism by DeepSpeed's Ulysses: ranks share the columns of a row, and in attention its heads.

Legend: R rows, L columns, P ranks that share a row.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_core.models.isolation import FLASH, end_to_end, restarts_within
from rlhf_core.models.policy import Policy

_NAME = "ulysses"  # in transformers' table of attention functions


class SequenceShards:
    """Runs a module on this rank's columns, and returns what all ranks have: objectives see whole rows."""

    def __init__(self, module: Any, size: int, attention: str):
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:  # one mesh for all models of the process
            parallel_state_sp.initialize_sequence_parallel(size)
        self.groups: Any = parallel_state_sp  # DeepSpeed's `mpu`
        self._group: Any = parallel_state_sp.get_sequence_parallel_group()
        self._rank, self._size = dist.get_rank(self._group), size
        self._predicts = isinstance(module, Policy)
        _attend_over_ranks(module.lm, attention, self._group)

    def __call__(self, module: Any, *, input_ids: Tensor, position_ids: Tensor, **inputs: Any) -> Tensor:
        """The module's output (R, L, ...) or, with entropies, (2, R, L). input_ids, position_ids: (R, L), L a multiple
        of P.

        Packed rows are laid end to end before ranks share them: flash attention isolates samples in a single row.
        """
        unfit = sorted(name for name, value in inputs.items() if isinstance(value, Tensor))
        if unfit or input_ids.shape[1] % self._size:
            raise ValueError(
                f"sequence_parallel {self._size} takes rows of a multiple of {self._size} tokens and nothing but "
                f"input_ids and position_ids; given {input_ids.shape[1]} columns, {unfit}"
            )
        if len(input_ids) > 1 and restarts_within(position_ids):
            row = self(module, input_ids=end_to_end(input_ids), position_ids=end_to_end(position_ids), **inputs)
            column = self._column(row)
            return row.flatten(column - 1, column).unflatten(column - 1, input_ids.shape)
        if self._predicts:
            # The token after this rank's last lies on the next rank: so each column's own prediction is asked for.
            inputs["labels"] = self._columns(input_ids.roll(-1, dims=1))
        own = module(input_ids=self._columns(input_ids), position_ids=self._columns(position_ids), **inputs)
        outputs: Any = _GatherColumns.apply(own, self._group, self._rank, self._size, self._column(own))
        if not self._predicts:
            return outputs
        return torch.where(position_ids == 0, 0.0, functional.pad(outputs[..., :-1], (1, 0)))

    def _column(self, outputs: Tensor) -> int:
        """The dimension of an output that counts columns."""
        return outputs.dim() - 1 if self._predicts else 1

    def _columns(self, values_RL: Tensor) -> Tensor:
        return values_RL.chunk(self._size, dim=1)[self._rank].contiguous()


class _GatherColumns(torch.autograd.Function):
    """(R, L / P, ...) of every rank -> (R, L, ...) on each; `column` is the dimension of L.

    All ranks compute the same loss from it. So the gradient of this rank's columns is its own slice, without a sum
    over ranks, and the sum over ranks of the parameters' gradients is the whole row's.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, rank: int, size: int, column: int) -> Tensor:
        ctx.rank, ctx.size, ctx.column = rank, size, column
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, dim=column)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].chunk(ctx.size, dim=ctx.column)[ctx.rank], None, None, None, None


def _attend_over_ranks(lm: Any, core: str, group: Any) -> None:
    """Gives the model an attention function that exchanges columns for heads, attends by `core`, and changes back.

    `core` attends causally over whole rows. Isolated samples in a row need one that reads position_ids, which of
    transformers' only flash attention does without a mask.
    """
    function = _flash_attention if core == FLASH else _whole_rows(ALL_ATTENTION_FUNCTIONS[core])
    AttentionInterface.register(_NAME, _ulysses(function, core, group))
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    lm.set_attn_implementation(_NAME)


def _flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' flash attention, which it would look for under the name that the model's configuration gives."""
    output = _flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        query_length=query.shape[2],
        is_causal=True,
        softmax_scale=scaling,
        target_dtype=get_target_dtype(query, module),
        attn_implementation=FLASH,
        **options,
    )
    return output, None


def _whole_rows(core: Callable[..., Any]) -> Callable[..., Any]:
    """`core`, which without a mask attends to all tokens before one, whatever the model's window."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        sliding_window: int | None = None,
        **options: Any,
    ) -> Any:
        if sliding_window is not None and sliding_window < key.shape[2]:
            raise ValueError(
                f"trainer.sequence_parallel with attention sdpa has no sliding window, and the model's of "
                f"{sliding_window} tokens is below the {key.shape[2]} of a row; use attention {FLASH}"
            )
        return core(module, query, key, value, attention_mask, **options)

    return attend


def _ulysses(core: Callable[..., Any], name: str, group: Any) -> Callable[..., Any]:
    exchanges: dict[tuple[int, ...], Any] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        """query: (R, heads, L / P, size); key, value: (R, kv heads, L / P, size)."""
        rows, heads, _, size = query.shape
        shape = (rows, heads, key.shape[1], size)
        if shape not in exchanges:
            exchanges[shape] = UlyssesSPAttentionHF(
                attn=core,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=size,
                kv_head_count=key.shape[1],
                num_hidden_layers=0,  # for its debugging alone
                process_group=group,
                seq_length_is_variable=True,
            )
            exchanges[shape].core_attn_implementation = name
        return exchanges[shape](module, query, key, value, None, **options)

    return attend
