"""The policy: a causal language model whose forward gives log-probs of the tokens it is shown.

Legend: B sequences, T tokens, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel


class Policy(nn.Module):
    """Wraps a Hugging Face causal model, so that logits do not leave the forward."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, attention_mask: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probs (B, T) float32: entry t is that of token t given the tokens before it; entry 0 is 0.

        input_ids, attention_mask: (B, T), padded on the right.
        """
        logits_BTV = self.lm(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return shifted_logprobs(logits_BTV, input_ids, temperature)


def shifted_logprobs(logits_BTV: Tensor, input_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of token t under the logits at t - 1, at the sampling temperature; (B, T) float32, entry 0 is 0."""
    logits = logits_BTV[:, :-1].float() / temperature
    taken = logits.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return torch.nn.functional.pad(taken - torch.logsumexp(logits, dim=-1), (1, 0))


def load_policy(directory: str, *, dtype: torch.dtype, attention: str) -> Policy:
    """The policy of a Hugging Face directory. Code of the model's own is not run."""
    lm = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, trust_remote_code=False, use_safetensors=True
    )
    lm.config.use_cache = False
    return Policy(lm)
