"""Muon for the hidden layers' matrices and AdamW for the rest, against NumPy and torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engines

MUON: dict[str, Any] = {
    "name": "muon",
    "lr": 0.01,
    "muon_lr": 0.05,
    "muon_momentum": 0.9,
    "weight_decay": 0.1,
    "eps": 1e-2,
    "schedule": "constant",
    "warmup_ratio": 0.0,
}
STEPS = 2


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the quintic Newton-Schulz iteration as Jordan describes it (kellerjordan.github.io/posts/muon)."""
    x = matrix / np.linalg.norm(matrix)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def plain_training(directory: str, samples: Any) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    named = dict(model.named_parameters())
    hidden = {name for name, p in named.items() if p.dim() == 2 and "layers." in name}
    rest = [p for name, p in named.items() if name not in hidden]
    decayed = [p for p in rest if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in rest if p.dim() == 1]}]
    adam = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.0)
    momentum = {name: np.zeros(named[name].shape) for name in hidden}
    for _ in range(STEPS):
        model.zero_grad()
        rows = [torch.tensor([ids]) for ids, _ in samples]
        logits = torch.cat([model(input_ids=row).logits[0, :-1] for row in rows])
        labels = torch.cat([torch.tensor([-100] * start + list(ids[start:]))[1:] for ids, start in samples])
        functional.cross_entropy(logits, labels).backward()
        adam.step()
        for name in hidden:
            gradient = named[name].grad.double().numpy()
            momentum[name] = 0.9 * momentum[name] + 0.1 * gradient
            update = orthogonalised(0.1 * gradient + 0.9 * momentum[name])  # Nesterov
            rows_, columns = update.shape
            with torch.no_grad():
                named[name].mul_(1 - 0.05 * 0.1)
                named[name].sub_(torch.from_numpy(0.05 * max(1, rows_ / columns) ** 0.5 * update).float())
    return {name: p.detach().numpy() for name, p in named.items()}


@pytest.mark.parametrize(
    ("ranks", "zero_stage", "dtype"),
    [
        (2, 0, "float32"),
        (1, 1, "float32"),
        (2, 2, "float32"),
        (2, 3, "float32"),
        (2, 1, "bfloat16"),
        (2, 2, "bfloat16"),
    ],
)
def test_muon(groups: Any, llama: str, exchanges: Any, ranks: int, zero_stage: int, dtype: str) -> None:
    """DeepSpeed's iteration runs in 16 bits where the processor can, so the updates agree to some percent; it raises
    small singular values, and with them the errors of a bfloat16 gradient."""
    done = groups[ranks].run(
        "train",
        kind="sft",
        model=llama,
        samples=exchanges,
        dtype=dtype,
        trainer={"ranks": ranks, "zero_stage": zero_stage, "micro_batch_size": 2},
        optimizer={**MUON, "max_grad_norm": 0.01},  # which would undo the updates' scale
        steps=STEPS,
    )[0]
    assert done["lr"] == pytest.approx([0.01] * STEPS)  # AdamW's
    start = {name: p.detach().numpy() for name, p in AutoModelForCausalLM.from_pretrained(llama).named_parameters()}
    expected = plain_training(llama, exchanges)
    assert done["parameters"].keys() == expected.keys()
    for name, wanted in expected.items():
        moved, wanted_move = done["parameters"][name] - start[name], wanted - start[name]
        # A bfloat16 weight can be off by half a unit in its last place, which is large beside so few steps.
        share, rounding = (0.05, 0.0) if dtype == "float32" else (0.15, np.linalg.norm(wanted) * 2**-9)
        assert np.linalg.norm(moved - wanted_move) < share * np.linalg.norm(wanted_move) + rounding, name


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_muon_goes_on_to_the_bit(groups: Any, llama: str, exchanges: Any, tmp_path: Path, zero_stage: int) -> None:
    done = groups[2].run(
        "resume",
        model=llama,
        trainer={"ranks": 2, "zero_stage": zero_stage, "micro_batch_size": 2},
        dtype="float32",
        samples=exchanges,
        before=2,
        after=2,
        optimizer=MUON,
        directory=str(tmp_path),
    )
    for rank in done:
        assert rank["resumed"] == rank["straight"]
        assert rank["resumed_digest"] == rank["straight_digest"]


def test_muon_takes_the_matrices_of_the_layers_alone(scorer: str) -> None:
    """Not embeddings, norms, a score's head or an output head."""
    from rlhf_core.config.training import OptimizerSettings
    from rlhf_core.models.scorer import load_scorer
    from rlhf_core.training.parameters import parameter_groups

    module = load_scorer(scorer, dtype=torch.float32, attention="sdpa", pad_token_id=0)
    names = {id(p): name for name, p in module.named_parameters()}
    groups = parameter_groups(module, OptimizerSettings(**MUON))
    by = {muon: {names[id(p)] for g in groups if g["use_muon"] is muon for p in g["params"]} for muon in (True, False)}
    assert len(by[True]) == 2 * 7  # layers: q, k, v, o, gate, up, down
    assert all(".layers." in name and name.endswith("_proj.weight") for name in by[True])
    assert by[True] | by[False] == set(names.values())
    assert {"lm.score.weight", "lm.model.embed_tokens.weight"} <= by[False]
    assert {(g["lr"], g["weight_decay"]) for g in groups if not g["use_muon"]} == {(0.01, 0.1), (0.01, 0.0)}
