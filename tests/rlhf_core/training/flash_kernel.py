"""flash_attention_2 where there is no such kernel: transformers' own code around it, and attention by its definition.

Torch and transformers are imported inside the functions alone: this file is loaded in ranks before they have joined.
"""

from itertools import pairwise
from typing import Any


def install(lm: Any) -> None:
    """`lm` attends by flash_attention_2, which in this process is now the functions below."""
    from transformers import modeling_flash_attention_utils as library

    def functions(implementation: str | None, *_: Any) -> Any:
        assert implementation == "flash_attention_2", f"transformers looks for a kernel named {implementation}"
        process = library._lazy_define_process_function(attend_packed)
        return (attend, attend_packed, None, None, None), (process, dict)

    library.lazy_import_flash_attention = functions  # type: ignore[assignment]
    lm.config._attn_implementation = "flash_attention_2"  # from_pretrained would look for the package


def attend_packed(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:
    """flash_attn_varlen_func: q, k, v (tokens, heads, size) of sequences end to end, bounded by cu_seqlens."""
    import torch

    bounds = cu_seqlens_q.tolist()
    assert bounds == cu_seqlens_k.tolist()
    parts = [slice(start, end) for start, end in pairwise(bounds)]
    given = {"softmax_scale": softmax_scale, "causal": causal}
    return torch.cat([attend(q[None, p], k[None, p], v[None, p], **given)[0] for p in parts])


def attend(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Any:
    """flash_attn_func: q (rows, tokens, heads, size); k, v of as many heads or of fewer, which heads share."""
    import torch

    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("rihd,rjhd->rhij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.einsum("rhij,rjhd->rihd", scores.softmax(-1), v)
