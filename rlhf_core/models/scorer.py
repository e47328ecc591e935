"""Reward and value models: a sequence-classification model of one label, scored at every token.

Legend: B sequences, T tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.models.backbone import given, hidden_states


class Scorer(nn.Module):
    """Wraps `AutoModelForSequenceClassification` (head `score`), so that what is saved loads as exactly that."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm: Any = lm

    @property
    def head(self) -> nn.Linear:
        return self.lm.score

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        aux_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scores (B, T) float32, one at every token. All inputs are (B, T).

        Args:
            attention_mask: for rows padded on the right; None where position_ids restart with each packed sample.
            aux_mask: 1 on the tokens that count in the load-balancing loss of a mixture of experts; the result is then
                (scores, loss).
        """
        hidden, aux = hidden_states(
            self.lm, input_ids, position_ids=position_ids, attention_mask=attention_mask, aux_mask=aux_mask
        )
        scores = self.head(hidden).squeeze(-1).float()
        return scores if aux is None else (scores, aux)


def last_token_scores(scores_BT: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,): the score at the last attended position of each row, wherever the padding is."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = torch.where(attention_mask.bool(), positions, -1).max(dim=1).values
    return scores_BT.gather(1, last.unsqueeze(1)).squeeze(1)


def load_scorer(
    directory: str,
    *,
    dtype: torch.dtype,
    attention: str,
    pad_token_id: int,
    experts: str | None = None,
    quantization: Any = None,
) -> Scorer:
    """The scorer of a Hugging Face directory, of a reward model or of a policy (whose head is then new).

    `pad_token_id` goes into the configuration: Hugging Face's own forward needs it to find the last token.
    """
    lm = AutoModelForSequenceClassification.from_pretrained(
        directory,
        num_labels=1,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
        pad_token_id=pad_token_id,
        **given(experts_implementation=experts, quantization_config=quantization),
    )
    lm.config.use_cache = False
    return Scorer(lm)


def initialise_head(scorer: Scorer, seed: int) -> None:
    """Draws the head anew: normal, standard deviation 1 / sqrt(hidden + 1) (Stiennon et al. 2020, section C.2)."""
    weight = scorer.head.weight
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(weight.shape, generator=generator) / (weight.shape[1] + 1) ** 0.5
    with torch.no_grad():
        weight.copy_(drawn.to(weight.dtype))
