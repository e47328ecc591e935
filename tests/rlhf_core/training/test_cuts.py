"""Gradient and loss do not depend on how a step was cut: against plain PyTorch, sample by sample, unpadded."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

pytestmark = pytest.mark.engines

LR, STEPS = 0.5, 2

# With eps = 1 an update of AdamW is almost proportional to the gradient, and so shows its scale; a small eps hides it.
OPTIMIZER = {
    "lr": LR,
    "eps": 1.0,
    "betas": (0.9, 0.95),
    "weight_decay": 0.01,
    "schedule": "constant",
    "warmup_ratio": 0.0,
    "max_grad_norm": 1e9,
}

# (ranks, samples in a micro-batch) for 8 samples
CUTS = [(1, 8), (1, 2), (2, 4), (2, 1)]


def sft_loss(model: Any, samples: Any) -> Tensor:
    """Mean of the cross-entropy over the response tokens of all samples."""
    logits, labels = [], []
    for ids, start in samples:
        wanted = torch.tensor([-100] * start + list(ids[start:]))
        logits.append(model(input_ids=torch.tensor([ids])).logits[0, :-1])
        labels.append(wanted[1:])
    return functional.cross_entropy(torch.cat(logits), torch.cat(labels), ignore_index=-100)


def rm_loss(model: Any, samples: Any) -> Tensor:
    """Mean over pairs, with Hugging Face's own choice of the token that is scored."""

    def score(ids: Any) -> Tensor:
        return model(input_ids=torch.tensor([ids])).logits[0, 0]

    return torch.stack([functional.softplus(score(b[0]) - score(a[0])) for a, b in samples]).mean()


def policy_loss(model: Any, samples: Any) -> Tensor:
    """PPO's clipped loss, token by token: Schulman et al. 2017, eq. 7, with epsilon 0.2, at temperature 0.7."""
    losses = []
    for s in samples:
        ids = torch.tensor(np.concatenate([s["prompt_ids"], s["response_ids"]]))
        logprobs = functional.log_softmax(model(input_ids=ids[None]).logits[0] / 0.7, dim=-1)
        start = len(s["prompt_ids"])
        for t in np.flatnonzero(s["action_mask"]):
            ratio = torch.exp(logprobs[start + t - 1, ids[start + t]] - float(s["logprobs"][t]))
            advantage = float(s["advantages"][t])
            bound = 1.2 if advantage > 0 else 0.8
            outside = ratio.item() > bound if advantage > 0 else ratio.item() < bound
            losses.append(torch.tensor(-bound * advantage) if outside else -ratio * advantage)
    return torch.stack(losses).mean()


def value_loss(model: Any, samples: Any) -> Tensor:
    """Half the larger of the squared errors of the value and of the value kept within 0.2 of the old one."""
    losses = []
    for s in samples:
        ids = torch.tensor(np.concatenate([s["prompt_ids"], s["response_ids"]]))
        values = model.score(model.model(input_ids=ids[None]).last_hidden_state)[0, :, 0]
        start = len(s["prompt_ids"])
        for t in np.flatnonzero(s["action_mask"]):
            value, old, target = values[start + t - 1], float(s["values"][t]), float(s["returns"][t])
            near = min(max(value.item(), old - 0.2), old + 0.2)
            moved = value if near == value.item() else torch.tensor(near)
            errors = [(value - target) ** 2, (moved - target) ** 2]
            losses.append(0.5 * max(errors, key=Tensor.item))
    return torch.stack(losses).mean()


KINDS: dict[str, tuple[str, str, Callable[[Any, Any], Tensor]]] = {
    "sft": ("llama", "exchanges", sft_loss),
    "rm": ("scorer", "pairs", rm_loss),
    "policy": ("llama", "trajectories", policy_loss),
    "value": ("scorer", "trajectories", value_loss),
}


def plain_training(
    kind: str, directory: str, samples: Any, *, lrs: Sequence[float] = (LR,) * STEPS, max_norm: float = 1e9
) -> tuple[dict[str, np.ndarray], list[float], list[float]]:
    """torch's AdamW on the whole batch, a step for each of `lrs`: (parameters, losses, gradient norms)."""
    auto = AutoModelForCausalLM if kind in ("sft", "policy") else AutoModelForSequenceClassification
    model = auto.from_pretrained(directory, attn_implementation="eager")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        eps=1.0,
        betas=(0.9, 0.95),
    )
    losses, norms = [], []
    for lr in lrs:
        for group in adam.param_groups:
            group["lr"] = lr
        adam.zero_grad()
        loss = KINDS[kind][2](model, samples)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        adam.step()
        losses.append(loss.item())
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, losses, norms


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """kind -> (start, parameters, losses, gradient norms) of the plain computation, computed once."""
    cache: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in cache:
            model, samples, _ = KINDS[kind]
            directory = request.getfixturevalue(model)
            start, _, _ = plain_training(kind, directory, [], lrs=[])
            cache[kind] = (start, *plain_training(kind, directory, request.getfixturevalue(samples)))
        return cache[kind]

    return get


def assert_same_training(trained: dict[str, Any], expected: Any) -> None:
    start, parameters, losses, norms = expected
    assert trained["loss"] == pytest.approx(losses, rel=1e-5)
    assert trained["grad_norm"] == pytest.approx(norms, rel=1e-4)
    assert trained["parameters"].keys() == parameters.keys()
    for name, wanted in parameters.items():
        moved, wanted_move = trained["parameters"][name] - start[name], wanted - start[name]
        largest = np.abs(wanted_move).max()
        assert largest > 0, name
        assert np.abs(moved - wanted_move).max() < 2e-4 * largest + 2e-7, name


@pytest.mark.parametrize(("ranks", "micro"), CUTS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_sft_step_is_the_global_token_mean(
    groups: Any, llama: str, exchanges: Any, plain: Any, ranks: int, micro: int, zero_stage: int
) -> None:
    trained = groups[ranks].run(
        "train",
        kind="sft",
        model=llama,
        zero_stage=zero_stage,
        samples=exchanges,
        micro_batch_size=micro,
        steps=STEPS,
        optimizer=OPTIMIZER,
    )[0]
    assert_same_training(trained, plain("sft"))


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 2)])
@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("kind", ["rm", "policy", "value"])
def test_step_of_other_objectives_is_the_global_mean(
    groups: Any, request: pytest.FixtureRequest, plain: Any, kind: str, zero_stage: int, ranks: int, micro: int
) -> None:
    model, samples, _ = KINDS[kind]
    trained = groups[ranks].run(
        "train",
        kind=kind,
        model=request.getfixturevalue(model),
        zero_stage=zero_stage,
        samples=request.getfixturevalue(samples),
        micro_batch_size=micro,
        steps=STEPS,
        optimizer=OPTIMIZER,
    )[0]
    assert_same_training(trained, plain(kind))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradient_is_clipped_by_its_norm_over_ranks(groups: Any, llama: str, exchanges: Any, zero_stage: int) -> None:
    start, _, _ = plain_training("sft", llama, [], lrs=[])
    parameters, losses, norms = plain_training("sft", llama, exchanges, max_norm=0.1)
    assert min(norms) > 0.2  # so that it clips
    trained = groups[2].run(
        "train",
        kind="sft",
        model=llama,
        zero_stage=zero_stage,
        samples=exchanges,
        micro_batch_size=2,
        steps=STEPS,
        optimizer={**OPTIMIZER, "max_grad_norm": 0.1},
    )[0]
    # The norm that is logged is that before clipping.
    assert_same_training(trained, (start, parameters, losses, norms))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_recomputed_activations_change_nothing(
    groups: Any, llama: str, exchanges: Any, plain: Any, zero_stage: int
) -> None:
    trained = groups[2].run(
        "train",
        kind="sft",
        model=llama,
        zero_stage=zero_stage,
        samples=exchanges,
        micro_batch_size=2,
        steps=STEPS,
        optimizer=OPTIMIZER,
        checkpointing=True,
    )[0]
    assert_same_training(trained, plain("sft"))


def test_schedule_sets_the_learning_rate_that_is_logged(groups: Any, llama: str, exchanges: Any) -> None:
    """Two steps of warm-up, then down to 0 over two: 1/2, 2/2, 2/2, 1/2 of the peak."""
    lrs = [0.25, 0.5, 0.5, 0.25]
    expected = plain_training("sft", llama, exchanges, lrs=lrs)
    trained = groups[2].run(
        "train",
        kind="sft",
        model=llama,
        zero_stage=2,
        samples=exchanges,
        micro_batch_size=2,
        steps=4,
        total_steps=4,
        optimizer={**OPTIMIZER, "schedule": "linear", "warmup_ratio": 0.5, "min_lr_ratio": 0.0},
    )[0]
    assert trained["lr"] == pytest.approx(lrs)
    assert_same_training(trained, (plain_training("sft", llama, [], lrs=[])[0], *expected))
