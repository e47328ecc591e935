"""What a process reward model reads of a sampled response: its own tokens, with a placeholder behind each step."""

from typing import Any

import numpy as np

from rlhf_core.data.placeholders import place_steps, split_steps, step_ends
from rlhf_core.models.process_scorer import StepTokens
from rlhf_core.rollout.trajectory import Trajectory


def judged_ids(trajectory: Trajectory, tokenizer: Any, tokens: StepTokens) -> tuple[np.ndarray, list[int]]:
    """A trajectory's `judged_response`."""
    return judged_response(trajectory.prompt_ids, trajectory.response_ids, tokenizer, tokens)


def judged_response(
    prompt: np.ndarray, response: np.ndarray, tokenizer: Any, tokens: StepTokens
) -> tuple[np.ndarray, list[int]]:
    """(token ids up to the last placeholder, the placeholders' positions); without a step: the prompt and [].

    Steps are what stands between separators, as in training; a response that was cut off ends in a step as well.
    """
    response = answer_ids(response, tokenizer)
    text = tokenizer.decode(response.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    ends = step_ends(tokenizer, response.tolist(), split_steps(text, tokens.separator))
    # Two steps that end in one token are judged together.
    places = sorted({len(prompt) + end for end in ends})
    ids, positions = place_steps(np.concatenate([prompt, response]), places, tokens.placeholder)
    return (ids[: positions[-1] + 1], positions) if positions else (prompt, [])


def answer_ids(response: np.ndarray, tokenizer: Any) -> np.ndarray:
    """A response without the token that ended the assistant's turn, where it has one."""
    return response[:-1] if len(response) and _ends_turn(int(response[-1]), tokenizer) else response


def _ends_turn(token: int, tokenizer: Any) -> bool:
    """Chat templates end a turn with a special token, which need not be the tokenizer's EOS (Llama 3: <|eot_id|>)."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token == tokenizer.eos_token_id or (added is not None and added.special)
