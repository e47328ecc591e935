"""Reward and value models: a sequence-classification model of one label, scored at every token.

Legend: B sequences, T tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel


class Scorer(nn.Module):
    """Wraps `AutoModelForSequenceClassification` (head `score`), so that what is saved loads as exactly that."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm: Any = lm

    @property
    def classifier(self) -> Any:
        """The model itself, whose layers peft changes in place."""
        return self.lm if isinstance(self.lm, PreTrainedModel) else self.lm.get_base_model()

    @property
    def head(self) -> nn.Linear:
        return self.classifier.score

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, position_ids: Tensor | None = None
    ) -> Tensor:
        """Scores (B, T) float32, one at every token. All inputs are (B, T), padded on the right.

        attention_mask: None where position_ids restart with each packed sample.
        """
        backbone = getattr(self.classifier, self.classifier.base_model_prefix)
        hidden = backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return self.head(hidden).squeeze(-1).float()


def last_token_scores(scores_BT: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,): the score at the last attended position of each row, wherever the padding is."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = torch.where(attention_mask.bool(), positions, -1).max(dim=1).values
    return scores_BT.gather(1, last.unsqueeze(1)).squeeze(1)


def load_scorer(
    directory: str, *, dtype: torch.dtype, attention: str, pad_token_id: int, experts: str | None = None
) -> Scorer:
    """The scorer of a Hugging Face directory, of a reward model or of a policy (whose head is then new).

    `pad_token_id` goes into the configuration: Hugging Face's own forward needs it to find the last token.
    """
    options = {} if experts is None else {"experts_implementation": experts}
    lm = AutoModelForSequenceClassification.from_pretrained(
        directory,
        num_labels=1,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
        pad_token_id=pad_token_id,
        **options,
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
