"""Gradient and loss do not depend on how a step was cut: against plain PyTorch, sample by sample, unpadded."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

pytestmark = pytest.mark.engines


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


def ptx_loss(model: Any, samples: Any) -> Tensor:
    """Ouyang et al. 2022, eq. 2, with a coefficient of 0.5 (engine_parts.py) and the mean over tokens for both."""
    trajectories, rows = samples
    return policy_loss(model, trajectories) + 0.5 * sft_loss(model, rows)


def gspo_loss(model: Any, samples: Any) -> Tensor:
    """Zheng et al. 2025 with clipping at 0.2, plus 0.2 of the k3 estimate, less 0.3 of the entropy: means over
    responses of their tokens' means, at temperature 0.7."""
    losses = []
    for s in samples:
        ids = torch.tensor(np.concatenate([s["prompt_ids"], s["response_ids"]]))
        every = functional.log_softmax(model(input_ids=ids[None]).logits[0] / 0.7, dim=-1)
        own = np.flatnonzero(s["action_mask"])
        before = every[len(s["prompt_ids"]) - 1 + own]
        logprobs = before.gather(-1, torch.tensor(s["response_ids"])[own, None])[:, 0]
        entropy = -(before.exp() * before).sum(-1)
        old, reference = (torch.tensor(array[own]) for array in (s["logprobs"], s["logprobs"][::-1].copy()))
        ratio = torch.exp((logprobs - old).mean())
        advantages = torch.tensor(s["advantages"][own])
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = torch.exp(reference - logprobs) - 1 + logprobs - reference
        losses.append((-gain + 0.2 * kl - 0.3 * entropy).mean())
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


# objective: (model fixture, samples fixture, plain loss)
KINDS: dict[str, tuple[str, str, Callable[[Any, Any], Tensor]]] = {
    "sft": ("llama", "exchanges", sft_loss),
    "rm": ("scorer", "pairs", rm_loss),
    "policy": ("llama", "trajectories", policy_loss),
    "ptx": ("llama", "mixed", ptx_loss),
    "gspo": ("llama", "trajectories", gspo_loss),
    "value": ("scorer", "trajectories", value_loss),
}
REINFORCEMENT = ("policy", "ptx", "gspo", "value")


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few cases in which every two values of different factors meet: each time the one with most pairs not yet met."""

    def pairs(case: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    every = list(itertools.product(*factors.values()))
    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        chosen.append(dict(zip(factors, best, strict=True)))
    return chosen


FACTORS: dict[str, Sequence[Any]] = {
    "kind": [kind for kind in KINDS if kind not in REINFORCEMENT],
    "micro_batch_size": [1, 2, 4, 8],
    "ranks": [1, 2],
    "zero_stage": [0, 2, 3],
    "packing": [False, True],
}


def plain_gradient(kind: str, directory: str, samples: Any) -> tuple[float, dict[str, np.ndarray]]:
    auto = AutoModelForSequenceClassification if KINDS[kind][0] == "scorer" else AutoModelForCausalLM
    model = auto.from_pretrained(directory, attn_implementation="eager")
    loss = KINDS[kind][2](model, samples)
    loss.backward()
    return loss.item(), {name: p.grad.double().numpy() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """(kind, model fixture) -> (loss, gradient by name) of the plain computation, computed once."""
    cache: dict[Any, Any] = {}

    def get(kind: str, model: str = "") -> Any:
        given = (model or KINDS[kind][0], KINDS[kind][1])
        if (kind, *given) not in cache:
            cache[kind, *given] = plain_gradient(kind, *map(request.getfixturevalue, given))
        return cache[kind, *given]

    return get


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum((np.asarray(array, dtype=np.float64) ** 2).sum() for array in arrays)))


def assert_same_gradient(found: dict[str, Any], expected: tuple[float, dict[str, np.ndarray]]) -> None:
    loss, gradients = expected
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["grad_norm"] == pytest.approx(norm(gradients.values()), rel=1e-5)
    assert found["gradients"].keys() == gradients.keys()
    for name, wanted in gradients.items():
        assert norm([wanted]) > 0, name
        assert norm([found["gradients"][name] - wanted]) < 1e-4 * norm([wanted]), name
    assert norm(found["gradients"][n] - g for n, g in gradients.items()) < 1e-5 * norm(gradients.values())


def run_gradient(
    request: pytest.FixtureRequest, groups: Any, kind: str, ranks: int, model: str = "", **trainer: Any
) -> dict[str, Any]:
    samples = KINDS[kind][1]
    return groups[ranks].run(
        "gradient",
        kind=kind,
        model=request.getfixturevalue(model or KINDS[kind][0]),
        samples=request.getfixturevalue(samples),
        trainer={"ranks": ranks, **trainer},
    )[0]


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
def test_gradient_is_that_of_the_whole_batch(
    groups: Any, request: pytest.FixtureRequest, plain: Any, case: dict[str, Any]
) -> None:
    assert_same_gradient(run_gradient(request, groups, **case), plain(case["kind"]))


@pytest.mark.parametrize(
    ("ranks", "micro_batch_size", "zero_stage", "packing"),
    [(1, 8, 0, False), (2, 3, 2, False), (2, 1, 3, True), (1, 2, 3, True)],
)
@pytest.mark.parametrize("kind", REINFORCEMENT)
def test_gradient_of_a_rollout_is_that_of_the_whole_batch(
    groups: Any,
    request: pytest.FixtureRequest,
    plain: Any,
    kind: str,
    ranks: int,
    micro_batch_size: int,
    zero_stage: int,
    packing: bool,
) -> None:
    given = {"micro_batch_size": micro_batch_size, "zero_stage": zero_stage, "packing": packing}
    assert_same_gradient(run_gradient(request, groups, kind, ranks, **given), plain(kind))


SHARED = {"sft": "llama_two", "rm": "scorer_two"}
SHARED_ROLLOUTS = {"ptx": "llama_two", "gspo": "llama_two", "value": "scorer_two"}


@pytest.mark.parametrize(
    ("kind", "shared", "zero_stage"),
    [
        ("ptx", "tensor_parallel", 2),
        ("gspo", "tensor_parallel", 3),
        ("value", "tensor_parallel", 2),
        ("ptx", "sequence_parallel", 3),
        ("gspo", "sequence_parallel", 2),
        ("value", "sequence_parallel", 2),
    ],
)
def test_ranks_that_share_trajectories_have_the_gradient_of_the_whole_batch(
    groups: Any, request: pytest.FixtureRequest, plain: Any, kind: str, shared: str, zero_stage: int
) -> None:
    given = {"micro_batch_size": 3, "zero_stage": zero_stage, shared: 2}
    model = SHARED_ROLLOUTS[kind]
    assert_same_gradient(run_gradient(request, groups, kind, 2, model, **given), plain(kind, model))


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("kind", list(SHARED))
@pytest.mark.parametrize("shared", ["tensor_parallel", "sequence_parallel"])
def test_ranks_that_share_samples_have_the_gradient_of_the_whole_batch(
    groups: Any, request: pytest.FixtureRequest, plain: Any, kind: str, shared: str, zero_stage: int
) -> None:
    given = {"micro_batch_size": 4, "zero_stage": zero_stage, shared: 2}
    assert_same_gradient(run_gradient(request, groups, kind, 2, SHARED[kind], **given), plain(kind, SHARED[kind]))


def test_sequence_parallel_ranks_repeat_a_single_head_of_keys(
    groups: Any, request: pytest.FixtureRequest, plain: Any
) -> None:
    assert_same_gradient(run_gradient(request, groups, "sft", 2, sequence_parallel=2, zero_stage=2), plain("sft"))


@pytest.mark.parametrize("shared", [{}, {"ranks": 2, "sequence_parallel": 2}], ids=str)
@pytest.mark.parametrize("kind", list(SHARED))
def test_packed_rows_have_the_gradient_of_the_whole_batch_under_flash_attention(
    groups: Any, request: pytest.FixtureRequest, plain: Any, kind: str, shared: dict[str, int]
) -> None:
    """All samples in one micro-batch of several rows, of which transformers' flash attention isolates none. Its own
    code around the kernel, and the kernel by its definition (flash_kernel.py)."""
    given = {"ranks": 1, **shared, "micro_batch_size": 4, "packing": True, "attention": "flash_attention_2"}
    found = run_gradient(request, groups, kind, given.pop("ranks"), SHARED[kind], zero_stage=1, **given)
    assert_same_gradient(found, plain(kind, SHARED[kind]))


def test_tensor_parallel_ranks_share_packed_rows(groups: Any, request: pytest.FixtureRequest, plain: Any) -> None:
    given = {"micro_batch_size": 4, "zero_stage": 1, "tensor_parallel": 2, "packing": True}
    assert_same_gradient(run_gradient(request, groups, "sft", 2, "llama_two", **given), plain("sft", "llama_two"))
