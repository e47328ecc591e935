"""Tiny reward models in Hugging Face's layout, with scores far from one another. Random, of the demo's tokenizer."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_core.models.process_scorer import StepTokens, load_process_scorer
from rlhf_core.models.scratch import write_scratch_model

PLACEHOLDER, RIGHT, WRONG = 20, 21, 22  # reserved tokens


def base_model(directory: Path) -> Path:
    return write_scratch_model(
        directory / "base", hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, max_position=32, seed=3
    )


def write_reward_model(directory: Path, statistics: tuple[float, float] | None = (0.5, 2.0)) -> Path:
    """statistics: mean and std in config.json."""
    base = base_model(directory)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    if statistics is not None:
        model.config.update(dict(zip(("mean", "std"), statistics, strict=True)))
    model.save_pretrained(directory / "reward")
    AutoTokenizer.from_pretrained(base).save_pretrained(directory / "reward")
    return directory / "reward"


def write_process_model(directory: Path, template: str | None = None) -> Path:
    base = base_model(directory)
    tokens = StepTokens(PLACEHOLDER, (RIGHT, WRONG), ",", template)
    scorer = load_process_scorer(str(base), tokens=tokens, dtype=torch.float32, attention="sdpa")
    with torch.no_grad():
        for parameter in scorer.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    scorer.lm.save_pretrained(directory / "process")
    AutoTokenizer.from_pretrained(base).save_pretrained(directory / "process")
    assert "process_reward" in json.loads((directory / "process" / "config.json").read_text())
    return directory / "process"


def digits(text: str) -> list[int]:
    """Ids of the scratch tokenizer's plain characters; 0 <pad>, 1 <s>, 2 <|end|>, 4 <|user|>, 5 <|assistant|>."""
    return [6 + "0123456789+=,#".index(character) for character in text]
