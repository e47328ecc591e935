"""Ranks that serve all tests here, a small Llama on disk, and samples of different lengths for every objective."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MixtralConfig, MixtralForCausalLM

from rlhf_core.models.scratch import write_scratch_model
from rlhf_core.models.tokenizer import load_tokenizer

VOCABULARY = 32


def _ranks_module() -> Any:
    spec = importlib.util.spec_from_file_location("training_ranks", Path(__file__).with_name("ranks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, Any]]:
    """Groups of 1 and of 2 ranks by size, started together."""
    made = {size: _ranks_module().Ranks(size) for size in (2, 1)}
    try:
        for group in made.values():
            group.join()
        yield made
    finally:
        for group in made.values():
            group.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A causal model whose log-probs are far from uniform, so that no gradient is near 0."""
    return str(make_llama(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="session")
def llama_dropout(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("models") / "llama-dropout", dropout=0.2))


@pytest.fixture(scope="session")
def llama_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two heads for keys and values as well, so that two tensor-parallel ranks can share them."""
    return str(make_llama(tmp_path_factory.mktemp("models") / "llama-two", kv_heads=2))


@pytest.fixture(scope="session")
def llama_tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("models") / "llama-tied", tied=True))


@pytest.fixture(scope="session")
def llama_tied_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("models") / "llama-tied-two", tied=True, kv_heads=2))


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory, llama: str) -> str:
    """A mixture of four experts whose log-probs are far from uniform, with the small Llama's tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "mixtral"
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    model.save_pretrained(directory)
    load_tokenizer(Path(llama)).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def scorer(tmp_path_factory: pytest.TempPathFactory, llama: str) -> str:
    """A reward model with a head that is far from 0."""
    return str(make_scorer(tmp_path_factory.mktemp("models") / "scorer", llama))


@pytest.fixture(scope="session")
def scorer_two(tmp_path_factory: pytest.TempPathFactory, llama_two: str) -> str:
    return str(make_scorer(tmp_path_factory.mktemp("models") / "scorer-two", llama_two))


def make_scorer(directory: Path, base: str) -> Path:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.score.weight.copy_(0.3 * torch.randn(model.score.weight.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


def make_llama(directory: Path, *, dropout: float = 0.0, tied: bool = False, kv_heads: int = 1) -> Path:
    write_scratch_model(
        directory,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=kv_heads,
        intermediate_size=64,
        max_position=64,
        seed=3,
        tie_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.config.attention_dropout = dropout
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def exchanges() -> list[tuple[tuple[int, ...], int]]:
    """8 of (token ids, where the response begins); lengths 3 to 19, responses 1 to 11 tokens."""
    rng = np.random.default_rng(0)
    prompts, responses = [2, 8, 3, 5, 4, 7, 2, 6], [1, 11, 4, 2, 9, 3, 7, 5]
    return [
        (tuple(map(int, rng.integers(6, VOCABULARY, prompt + response))), prompt)
        for prompt, response in zip(prompts, responses, strict=True)
    ]


@pytest.fixture(scope="session")
def pairs(exchanges: list[Any]) -> list[Any]:
    """8 pairs; the two sides have different lengths."""
    return list(zip(exchanges, exchanges[3:] + exchanges[:3], strict=True))


@pytest.fixture(scope="session")
def trajectories(exchanges: list[Any]) -> list[dict[str, np.ndarray]]:
    """8 trajectories. Old log-probs, values and advantages are drawn, so that some tokens are clipped and some not;
    of the longer responses one token in the middle is the environment's.
    """
    rng = np.random.default_rng(1)
    made = []
    for ids, start in exchanges:
        count = len(ids) - start
        mask = np.ones(count, dtype=bool)
        if count > 3:
            mask[count // 2] = False
        drawn = {name: rng.normal(size=count).astype(np.float32) for name in ("values", "advantages", "returns")}
        made.append(
            {
                "prompt_ids": np.array(ids[:start]),
                "response_ids": np.array(ids[start:]),
                "action_mask": mask,
                "logprobs": rng.normal(-3.5, 0.5, size=count).astype(np.float32),
                **drawn,
            }
        )
    return made


@pytest.fixture(scope="session")
def mixed(trajectories: list[Any], exchanges: list[Any]) -> tuple[list[Any], list[Any]]:
    """Trajectories and five SFT rows of one optimizer step: of two ranks one has fewer rows."""
    return trajectories, exchanges[1:6]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
