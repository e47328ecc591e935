"""Reward and value models: a sequence-classification model of one label, scored at every token.

Legend: B sequences, T tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.models.backbone import TokenScorer, given


class Scorer(TokenScorer):
    """Wraps `AutoModelForSequenceClassification` (head `score`), so that what is saved loads as exactly that."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm = lm

    @property
    def head(self) -> nn.Linear:
        return self.lm.score

    def outputs(self, hidden: Tensor) -> Tensor:
        """Scores (B, T)."""
        return self.head(hidden).squeeze(-1).float()


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
