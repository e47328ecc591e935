"""Prompts as token ids, with their labels, and the requests that a step makes of the sampler."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.errors import TokenError
from rlhf_core.data.rows import read_jsonl
from rlhf_core.rollout.outcomes import Response
from rlhf_core.rollout.sample import SampleRequest, sample_seed


@dataclass(frozen=True)
class Prompt:
    """prompt_id: row in its data set. source: that which the row names, of a mixture."""

    prompt_id: int
    text: str
    ids: tuple[int, ...]
    label: str
    source: str | None = None


def load_prompts(
    path: Path, tokenizer: Any, max_prompt_len: int, input_template: str | None = None
) -> tuple[list[Prompt], int]:
    """The prompts of a file, and how many were dropped for being longer than `max_prompt_len` tokens.

    They go through the tokenizer's chat template, or through `input_template` where the policy was trained with one.
    """
    rows = read_jsonl(path)
    text = TextSettings() if input_template is None else TextSettings(format="template", input_template=input_template)
    encoded = Encoder(tokenizer, text, sys.maxsize).prompts(rows)
    prompts = [
        Prompt(
            prompt_id=number,
            text=shown(rows[number]["prompt"]),
            ids=tuple(item.samples[0].ids.tolist()),
            label=str(rows[number]["label"]),
            source=rows[number].get("source"),
        )
        for number, item in zip(encoded.row_ids, encoded.items, strict=True)
    ]
    kept = [prompt for prompt in prompts if len(prompt.ids) <= max_prompt_len]
    if not kept:
        shortest = min(len(prompt.ids) for prompt in prompts)
        raise TokenError(
            f"all {len(rows)} prompts are longer than max_prompt_len {max_prompt_len} tokens (the shortest has "
            f"{shortest}); raise it"
        )
    return kept, len(prompts) - len(kept)


def shown(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as text for samples and reports: of a conversation, what was said."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{one['role']}: {one['content']}" for one in prompt)


def rollout_requests(
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    seed: int,
    step: int,
    stop_token_ids: tuple[int, ...],
    first_group: int = 0,
) -> list[SampleRequest]:
    """samples_per_prompt requests a prompt, in order. A sample's id is its place in the rollout, of which these prompts
    are the groups from `first_group` on. Each response ends with the first of `stop_token_ids`."""
    return [
        SampleRequest(
            sample_id=group * samples_per_prompt + k,
            prompt_ids=prompt.ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=sample_seed(seed, step, prompt.prompt_id, group * samples_per_prompt + k),
            stop_token_ids=stop_token_ids,
        )
        for group, prompt in enumerate(prompts, start=first_group)
        for k in range(samples_per_prompt)
    ]


def greedy_requests(
    prompts: Sequence[Prompt], *, max_new_tokens: int, stop_token_ids: tuple[int, ...]
) -> list[SampleRequest]:
    """One greedy request a prompt."""
    return [
        SampleRequest(
            sample_id=number,
            prompt_ids=prompt.ids,
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            top_p=1.0,
            seed=0,
            stop_token_ids=stop_token_ids,
        )
        for number, prompt in enumerate(prompts)
    ]


def sampled_response(tokenizer: Any, prompt: Prompt, response_ids: Sequence[int], completion: str) -> Response:
    """What sources that read text are given of a sampled response."""
    query = tokenizer.decode([*prompt.ids, *response_ids], skip_special_tokens=False)
    return Response(query=query, prompt=prompt.text, completion=completion, label=prompt.label)


def completion_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The response as text, without special tokens."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True)
