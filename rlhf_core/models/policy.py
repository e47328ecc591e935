"""The policy: a causal language model whose forward gives log-probs of the tokens it is shown.

Legend: R rows, L columns, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from rlhf_core.models.backbone import given, hidden_states
from rlhf_core.models.head import TokenHead, logit_transform


class CausalModel(nn.Module):
    """A Hugging Face causal model whose logits are never made for all tokens at once."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm: Any = lm
        head: Any = lm.get_output_embeddings()
        if not isinstance(head, TokenHead):
            lm.set_output_embeddings(TokenHead.of(head, logit_transform(lm.config)))

    @property
    def head(self) -> TokenHead:
        return self.lm.get_output_embeddings()


class Policy(CausalModel):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        *,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        aux_mask: Tensor | None = None,
        entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probs (R, L) float32: entry t is that of token t given the tokens before it in its sample.

        The first token of a sample, which nothing precedes, has 0. All inputs are (R, L).

        Args:
            attention_mask: for rows padded on the right; None where position_ids restart with each packed sample.
            labels: the tokens whose log-probs are wanted, entry t under what follows token t; the result is then not
                moved to the tokens' own places. For rows whose next token lies on another rank.
            aux_mask: 1 on the tokens that count in the load-balancing loss of a mixture of experts; the result is then
                (log-probs, loss).
            entropy: log-probs become (2, R, L), the second being the entropy of the distribution that token t was
                drawn from.
        """
        hidden, aux = hidden_states(
            self.lm, input_ids, position_ids=position_ids, attention_mask=attention_mask, aux_mask=aux_mask
        )
        if labels is not None:
            logprobs = self.head(hidden, labels=labels, temperature=temperature, entropy=entropy)
        else:
            following = self.head(hidden[:, :-1], labels=input_ids[:, 1:], temperature=temperature, entropy=entropy)
            logprobs = functional.pad(following, (1, 0))
            if position_ids is not None:
                logprobs = torch.where(position_ids == 0, 0.0, logprobs)
        return logprobs if aux is None else (logprobs, aux)


def load_policy(
    directory: str, *, dtype: torch.dtype, attention: str, experts: str | None = None, quantization: Any = None
) -> Policy:
    """The policy of a Hugging Face directory. Code of the model's own is not run."""
    lm = load_causal(directory, dtype=dtype, attention=attention, experts=experts, quantization=quantization)
    return Policy(lm)


def load_causal(
    directory: str, *, dtype: torch.dtype, attention: str, experts: str | None = None, quantization: Any = None
) -> PreTrainedModel:
    """experts: kernel of a mixture of experts. quantization: of frozen weights, see lora.nf4_config.

    Raises ValueError for a generation_config.json with which the model could not be saved.
    """
    lm = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        use_safetensors=True,
        **given(experts_implementation=experts, quantization_config=quantization),
    )
    lm.config.use_cache = False
    mend_generation(lm)
    return lm


def mend_generation(lm: PreTrainedModel) -> None:
    """Of sampling parameters without do_sample, as Llama 2 was published with, transformers reads a
    generation_config.json and refuses to write it: do_sample is what they mean.

    Raises ValueError where it would be refused still, which is better known before training than at the export.
    """
    generation: Any = lm.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
        try:
            generation.validate(strict=True)
        except ValueError as error:
            why = " ".join(str(error).split())
            raise ValueError(f"the model's generation_config.json cannot be written again: {why}; mend it") from None


@torch.no_grad()
def check_head(model: CausalModel) -> None:
    """Refuses a model that turns hidden states into logits otherwise than TokenHead: its log-probs would be wrong.

    The model's own forward runs on made-up hidden states, so only the head computes. Under ZeRO-3 the head's weights
    have to be gathered.
    """
    lm, head = model.lm, model.head
    backbone = getattr(lm, lm.base_model_prefix)
    generator = torch.Generator().manual_seed(0)
    hidden: Any = torch.randn(1, 3, head.in_features, generator=generator).to(head.weight)
    ids = torch.zeros(1, 3, dtype=torch.long, device=head.weight.device)
    # An attribute of the instance hides the method of the class until it is deleted.
    made: Any = MoeModelOutputWithPast(last_hidden_state=hidden)
    made.cross_attentions = None  # which GPT-2 reads
    backbone.forward = lambda *_, **__: made
    try:
        logits = lm(input_ids=ids, use_cache=False).logits.float()
    finally:
        del backbone.forward
    ours = head(hidden, labels=ids)
    theirs = functional.log_softmax(logits, dim=-1)[..., 0]
    if not torch.allclose(ours, theirs, rtol=0, atol=0.02 * float(logits.abs().max()) + 1e-4):
        raise ValueError(
            f"models of type {lm.config.model_type} change their head's output in a way that is not known here, so "
            "log-probs would be wrong; use another model"
        )
