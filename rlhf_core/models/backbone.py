"""A Hugging Face model below its head: hidden states, and the load-balancing loss of a mixture of experts."""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_core.models.isolation import FLASH, end_to_end, restarts_within


def hidden_states(
    lm: PreTrainedModel,
    input_ids: Tensor,
    *,
    position_ids: Tensor | None,
    attention_mask: Tensor | None = None,
    aux_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(last hidden states (R, L, H), load-balancing loss or None). All inputs are (R, L).

    Transformers isolates packed samples by their restarting positions, if there is neither a mask nor a cache; its
    flash attention if they lie in one row, so there all rows go through as one. With aux_mask, 1 on the tokens that
    count, the loss is that of Fedus et al. 2022, eq. 4.
    """
    backbone = getattr(lm, lm.base_model_prefix)
    options = {} if aux_mask is None else {"output_router_logits": True}
    shape = input_ids.shape
    flash = lm.config._attn_implementation == FLASH
    if flash and attention_mask is None and position_ids is not None and restarts_within(position_ids):
        input_ids, position_ids = end_to_end(input_ids), end_to_end(position_ids)
    output = backbone(
        input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False, **options
    )
    hidden = output.last_hidden_state.reshape(*shape, -1)
    if aux_mask is None:
        return hidden, None
    routers: Any = output.router_logits
    aux: Any = load_balancing_loss_func(
        routers, routers[0].shape[-1], lm.config.num_experts_per_tok, attention_mask=aux_mask
    )
    return hidden, aux


class TokenScorer(nn.Module):
    """A model whose forward gives something at every token: a score, or the logits of some tokens."""

    lm: Any

    @abstractmethod
    def outputs(self, hidden: Tensor) -> Tensor:
        """Float32 (R, L, ...) of the last hidden states (R, L, H)."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        aux_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`outputs` at every position. All inputs are (R, L).

        Args:
            attention_mask: for rows padded on the right; None where position_ids restart with each packed sample.
            aux_mask: 1 on the tokens that count in the load-balancing loss of a mixture of experts; the result is then
                (outputs, loss).
        """
        hidden, aux = hidden_states(
            self.lm, input_ids, position_ids=position_ids, attention_mask=attention_mask, aux_mask=aux_mask
        )
        outputs = self.outputs(hidden)
        return outputs if aux is None else (outputs, aux)


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None: transformers tells an absent one from None."""
    return {name: value for name, value in options.items() if value is not None}
