"""Process reward models: a causal model that gives, at a placeholder token behind each step, a verdict on the step.

Legend: R rows, L columns, K reward tokens.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.backbone import TokenScorer
from rlhf_core.models.policy import CausalModel, load_causal

PROCESS_REWARD = "process_reward"  # in the model's config.json


@dataclass(frozen=True)
class StepTokens:
    """What turns a solution into the model's input and its logits into verdicts; kept in the model's config.json.

    Attributes:
        placeholder: id of the token that stands behind each step.
        verdicts: ids of the reward tokens, that of a right step first.
        separator: text that joins steps.
        template: text.input_template where prompts go through it; None where they go through the chat template.
    """

    placeholder: int
    verdicts: tuple[int, ...]
    separator: str
    template: str | None = None

    def write_into(self, lm: PreTrainedModel) -> None:
        """Into the configuration that is saved with the model."""
        setattr(lm.config, PROCESS_REWARD, {**asdict(self), "verdicts": list(self.verdicts)})

    @classmethod
    def of(cls, config: Mapping[str, Any], directory: str) -> "StepTokens":
        """From config.json's content. Raises ValueError where it is not that of a process reward model."""
        try:
            values = config[PROCESS_REWARD]
        except KeyError:
            raise ValueError(
                f"{directory} is no process reward model: its config.json has no {PROCESS_REWARD}; give the model of a "
                f"prm stage"
            ) from None
        return cls(values["placeholder"], tuple(values["verdicts"]), values["separator"], values["template"])


class ProcessScorer(CausalModel, TokenScorer):
    """A causal model whose logits exist for the reward tokens alone."""

    def __init__(self, lm: PreTrainedModel, tokens: StepTokens):
        super().__init__(lm)
        self.tokens = tokens
        tokens.write_into(lm)

    def outputs(self, hidden: Tensor) -> Tensor:
        """Logits of the reward tokens (R, L, K)."""
        return self.head(hidden, tokens=self.tokens.verdicts)


def load_process_scorer(
    directory: str,
    *,
    tokens: StepTokens | None,
    dtype: torch.dtype,
    attention: str,
    experts: str | None = None,
    quantization: Any = None,
) -> ProcessScorer:
    """The process scorer of a Hugging Face directory: of any causal model with `tokens`, of a trained one without."""
    lm = load_causal(directory, dtype=dtype, attention=attention, experts=experts, quantization=quantization)
    return ProcessScorer(lm, tokens or StepTokens.of(lm.config.to_dict(), directory))
