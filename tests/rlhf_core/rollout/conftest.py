"""A tiny random Llama and the transfers that a trainer would write of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.rollout.weight_transfer import TransferWriter


@dataclass(frozen=True)
class TinyLlama:
    """Two layers, hidden 128, 4 heads, 2 key-value heads, vocabulary 64, float32, on disk in `directory`."""

    directory: Path
    config: LlamaConfig

    def model(self, weights: Mapping[str, torch.Tensor]) -> LlamaForCausalLM:
        model = LlamaForCausalLM(self.config)
        # A tied head is absent from the weights, as in a checkpoint; the tie fills it.
        missing, unexpected = model.load_state_dict(dict(weights), strict=False)
        assert set(missing) <= ({"lm_head.weight"} if self.config.tie_word_embeddings else set())
        assert not unexpected
        return model.eval()

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Random weights under the checkpoint's names. No tensor has the same values for two seeds, norms included."""
        generator = torch.Generator().manual_seed(seed)
        named = LlamaForCausalLM(self.config).named_parameters()
        return {
            name: 0.1 * torch.randn(p.shape, generator=generator) + (1.0 if p.dim() == 1 else 0.0) for name, p in named
        }


def make_tiny_llama(directory: Path, *, tied: bool) -> TinyLlama:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    tiny = TinyLlama(directory, config)
    tiny.model(tiny.weights(seed=0)).save_pretrained(directory)
    return tiny


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make_tiny_llama(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return make_tiny_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture
def send(tmp_path: Path) -> Callable[[Mapping[str, torch.Tensor], int], Path]:
    """Writes a transfer in buckets of about 100 kB and returns its index."""

    def write(weights: Mapping[str, torch.Tensor], version: int) -> Path:
        writer = TransferWriter(tmp_path / f"transfer-{len(list(tmp_path.iterdir()))}", version, bucket_bytes=100_000)
        for name, tensor in weights.items():
            writer.add(name, tensor)
        return writer.finish().path

    return write
