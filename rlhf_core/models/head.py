"""The output head of a causal model: log-probs of given tokens without the logits of the whole vocabulary.

Legend: N positions, H hidden size, V vocabulary, K chosen tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

CHUNK_ELEMENTS = 2**25  # logits that exist at one time: 128 MiB in float32


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its head's output: logits = cap * tanh(scale * x / cap), without the cap scale * x."""

    scale: float = 1.0
    cap: float | None = None


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """Gemma caps its logits, Cohere multiplies, Granite divides, Falcon-H1 multiplies them."""
    values = config.to_dict()
    scale = (values.get("logit_scale") or 1.0) * (values.get("lm_head_multiplier") or 1.0)
    return LogitTransform(scale / (values.get("logits_scaling") or 1.0), values.get("final_logit_softcapping"))


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(f(h W^T + b))[label] in float32; with `entropy` also that of the distribution: (log-probs (N,),
    entropies (N,)).

    The forward takes some positions at a time. Saved for the backward are the inputs, the log-normaliser (N,) and the
    entropies. There logits are computed again, for some tokens of the vocabulary at a time: a token's row of the
    weights then has its gradient from one product, and what is added up in float32 is of hidden states' size, which
    is the smaller one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        form: LogitTransform,
        entropy: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows = _chunk(weight_VH)
        lse, taken, entropies = [], [], []
        for hidden, labels in zip(hidden_NH.split(rows), labels_N.split(rows), strict=True):
            logits = _transformed(functional.linear(hidden, weight_VH, bias_V), form)
            lse.append(torch.logsumexp(logits, dim=-1))
            taken.append(logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
            if entropy:  # - sum p log p, with log p = logit - lse
                entropies.append(lse[-1] - (torch.softmax(logits, dim=-1) * logits).sum(-1))
        lse_N = torch.cat(lse)
        entropy_N = torch.cat(entropies) if entropy else None
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N, lse_N, entropy_N)
        ctx.form = form
        logprobs_N = torch.cat(taken) - lse_N
        return logprobs_N if entropy_N is None else (logprobs_N, entropy_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N, lse_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_NH, dtype=_sum_dtype(hidden_NH)) if wants_hidden else None
        grad_weight = torch.empty_like(weight_VH) if wants_weight else None
        grad_bias = torch.empty_like(bias_V) if wants_bias else None
        columns = _chunk(hidden_NH)
        for start in range(0, len(weight_VH), columns):
            part = slice(start, start + columns)
            weight, bias = weight_VH[part], None if bias_V is None else bias_V[part]
            logits = _transformed(functional.linear(hidden_NH, weight, bias), ctx.form)
            further = None if entropy_N is None else _grad_entropy(logits, lse_N, entropy_N, grads[1])
            delta = _grad_logits(logits, lse_N, labels_N - start, grads[0], ctx.form, further).to(hidden_NH.dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden, delta, weight)
            if grad_weight is not None:
                grad_weight[part] = delta.T @ hidden_NH
            if grad_bias is not None:
                grad_bias[part] = delta.sum(0)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _chunk(other: Tensor) -> int:
    """How many positions or tokens of the vocabulary at a time, with all rows of the other matrix."""
    return max(1, CHUNK_ELEMENTS // len(other))


def _transformed(logits: Tensor, form: LogitTransform) -> Tensor:
    """In float32. Makes one new tensor at most, and none where there is nothing to do."""
    logits = logits.to(_sum_dtype(logits))
    if form.cap is not None:
        return torch.tanh(logits * (form.scale / form.cap)) * form.cap
    return logits if form.scale == 1.0 else logits * form.scale


def _grad_entropy(logits: Tensor, lse: Tensor, entropy: Tensor, grad: Tensor) -> Tensor:
    """grad * dH / dlogits = - grad * p (log p + H)."""
    logp = logits - lse.unsqueeze(-1)
    return (logp + entropy.unsqueeze(-1)).mul_(logp.exp_()).mul_(-grad.unsqueeze(-1))


def _grad_logits(
    logits: Tensor, lse: Tensor, labels: Tensor, grad: Tensor, form: LogitTransform, further: Tensor | None
) -> Tensor:
    """The gradient of the head's output before its transform: (grad * (onehot - softmax) + further) * f'. Changes
    `logits`. labels: column numbers; those outside are of another part of the vocabulary."""
    slope = form.scale if form.cap is None else form.scale * (1 - (logits / form.cap) ** 2)
    delta = logits.sub_(lse.unsqueeze(-1)).exp_().neg_()
    here = (labels >= 0) & (labels < delta.shape[-1])
    delta.scatter_add_(-1, labels.clamp(0, delta.shape[-1] - 1).unsqueeze(-1), here.to(delta.dtype).unsqueeze(-1))
    delta.mul_(grad.unsqueeze(-1))
    if further is not None:
        delta.add_(further)
    return delta if form == LogitTransform() else delta.mul_(slope)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right. In float32 for bfloat16 factors too, which would be rounded at each addition."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class TokenHead(nn.Linear):
    """Replaces a model's output head and shares its weights. Called as the model itself calls it, it gives logits.

    The log-probs are computed in its own forward, since that is where ZeRO-3 has the weights whole.
    """

    transform: LogitTransform

    @classmethod
    def of(cls, head: nn.Linear, transform: LogitTransform) -> "TokenHead":
        new = cls(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        new.weight, new.bias, new.transform = head.weight, head.bias, transform
        return new

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Tensor,  # the name that nn.Linear gives it
        *,
        labels: Tensor | None = None,
        tokens: tuple[int, ...] | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Tensor:
        """input: (..., H). With labels (...) long: their log-probs (...) float32 at the temperature; with `entropy`
        (2, ...), those and the entropies of the distributions. With K tokens: their logits (..., K) float32, as the
        model transforms them. With neither: the head's output (..., V)."""
        if tokens is not None:
            bias = None if self.bias is None else self.bias[list(tokens)]
            return _transformed(functional.linear(input, self.weight[list(tokens)], bias), self.transform)
        if labels is None:
            return super().forward(input)
        cap = self.transform.cap
        form = LogitTransform(self.transform.scale / temperature, None if cap is None else cap / temperature)
        flat = _TokenLogprobs.apply(input.flatten(0, -2), self.weight, self.bias, labels.flatten(), form, entropy)
        return torch.stack(flat).view(2, *labels.shape) if entropy else flat.view(labels.shape)
