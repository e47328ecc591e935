"""Optimizer steps to be cut: items, objective and the plain computation of SFT, RM, PRM, DPO and KTO.

cut_programs.py runs them on ranks, test_objective_cuts.py and benchmarks/cuts.py compare.
"""

# pyright: reportMissingImports=false
# The modules of the tests are found through sys.path, which whoever imports this has set.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cut_programs import adapt
from lora_programs import VERDICTS
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config.supervised import DpoSettings, KtoSettings, PrmSettings, RmSettings
from rlhf_core.config.training import OptimizerSettings
from rlhf_core.data.samples import Item, Sample
from rlhf_core.training.objective import Objective
from rlhf_core.training.objectives_preference import DpoObjective, KtoObjective
from rlhf_core.training.objectives_process import PrmObjective
from rlhf_core.training.objectives_reward import RmObjective
from rlhf_core.training.objectives_sft import SftObjective

BOUND = 1e-5  # of the relative errors of loss and gradient
VOCABULARY = 32  # the small Llama's
ITEMS = 7  # odd: of two ranks one has fewer
BETA, NLL_COEF, KL, UNDESIRABLE = 0.1, 0.2, 0.7, 0.6
COMMON: dict[str, Any] = {"optimizer": OptimizerSettings(lr=1.0), "batch_size": ITEMS, "max_len": 64, "max_steps": 1}


# -- the plain computation: sample by sample, unpadded, Hugging Face's forward ----------------------------------------


def target_logprobs(model: Any, sample: Sample) -> Tensor:
    """Log-probs of the tokens that are trained on."""
    ids = torch.tensor(sample.ids).long()
    logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[1:, None])[:, 0][torch.tensor(sample.weights[1:]) > 0]


def sft_loss(model: Any, items: Sequence[Item]) -> Tensor:
    return -torch.cat([target_logprobs(model, item.samples[0]) for item in items]).mean()


def rm_loss(model: Any, items: Sequence[Item]) -> Tensor:
    """Bradley-Terry, mean over the pairs."""
    scores = [[model(input_ids=torch.tensor(s.ids)[None].long()).logits[0, 0] for s in item.samples] for item in items]
    return -torch.stack([functional.logsigmoid(chosen - rejected) for chosen, rejected in scores]).mean()


def prm_loss(model: Any, items: Sequence[Item]) -> Tensor:
    """Cross entropy of the verdicts' logits, mean over the steps of all solutions."""
    losses = []
    for (sample,) in (item.samples for item in items):
        places, labels = np.flatnonzero(sample.weights), torch.tensor(sample.labels).long()
        logits = model(input_ids=torch.tensor(sample.ids)[None].long()).logits[0, places][:, list(VERDICTS)]
        losses.append(functional.cross_entropy(logits, labels[places], reduction="none"))
    return torch.cat(losses).mean()


def dpo_loss(model: Any, items: Sequence[Item]) -> Tensor:
    """Rafailov et al. 2023, eq. 7, with the chosen response's NLL by its tokens (Pang et al. 2024, eq. 1)."""
    losses = []
    for item in items:
        chosen, rejected = (target_logprobs(model, sample) for sample in item.samples)
        ratios = chosen.sum() - item.scalars["reference_chosen"], rejected.sum() - item.scalars["reference_rejected"]
        losses.append(-functional.logsigmoid(BETA * (ratios[0] - ratios[1])) - NLL_COEF * chosen.mean())
    return torch.stack(losses).mean()


def kto_loss(model: Any, items: Sequence[Item]) -> Tensor:
    """Ethayarajh et al. 2024, eq. 8."""
    losses = []
    for item in items:
        reward = BETA * (target_logprobs(model, item.samples[0]).sum() - item.scalars["reference"] - KL)
        good = item.scalars["label"] == 1.0
        losses.append(1 - torch.sigmoid(reward) if good else UNDESIRABLE * (1 - torch.sigmoid(-reward)))
    return torch.stack(losses).mean()


# -- items ------------------------------------------------------------------------------------------------------------


def sample(rng: np.random.Generator) -> Sample:
    """A prompt of 2 to 8 tokens and a response of 1 to 11."""
    prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 12))
    ids = rng.integers(6, VOCABULARY, prompt + response).astype(np.int32)
    return Sample(ids, (np.arange(len(ids)) >= prompt).astype(np.float32))


def judged(sample: Sample) -> Sample:
    """Verdicts at every third token of the response, and at its last."""
    ends = np.arange(len(sample))[::-1] % 3 == 0
    weights = sample.weights * ends
    return Sample(sample.ids, weights, sample.ids % len(VERDICTS) * weights)


def reference(rng: np.random.Generator, sample: Sample) -> float:
    """Of the size that the small model's own log-probs have."""
    return float(rng.normal(-4.0, 0.5) * sample.weights.sum())


def singles() -> list[Item]:
    rng = np.random.default_rng(0)
    return [Item((sample(rng),)) for _ in range(ITEMS)]


def pairs() -> list[Item]:
    rng = np.random.default_rng(1)
    return [Item((sample(rng), sample(rng))) for _ in range(ITEMS)]


def solutions() -> list[Item]:
    return [Item((judged(item.samples[0]),)) for item in singles()]


def compared_pairs() -> list[Item]:
    rng = np.random.default_rng(2)
    names = ("reference_chosen", "reference_rejected")
    return [
        Item(item.samples, {name: reference(rng, s) for name, s in zip(names, item.samples, strict=True)})
        for item in pairs()
    ]


def labelled() -> list[Item]:
    rng = np.random.default_rng(3)
    return [
        Item(item.samples, {"label": float(number % 3 > 0), "reference": reference(rng, item.samples[0])})
        for number, item in enumerate(singles())
    ]


# -- kinds of training ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    items: Callable[[], list[Item]]
    objective: Objective
    plain: Callable[[Any, Sequence[Item]], Tensor]
    lora: bool = False
    extra: dict[str, float] = field(default_factory=dict)


DPO = DpoObjective(DpoSettings(**COMMON, beta=BETA, nll_coef=NLL_COEF))
STEP_TOKENS = {"placeholder_token": "p", "reward_tokens": ("a", "b", "c")}
KINDS = {
    "sft": Kind(singles, SftObjective(), sft_loss),
    "rm": Kind(pairs, RmObjective(RmSettings(**COMMON)), rm_loss),
    "prm": Kind(solutions, PrmObjective(PrmSettings(**COMMON, **STEP_TOKENS)), prm_loss),
    "dpo": Kind(compared_pairs, DPO, dpo_loss),
    "kto": Kind(
        labelled,
        KtoObjective(KtoSettings(**COMMON, beta=BETA, undesirable_weight=UNDESIRABLE), samples_per_item=1),
        kto_loss,
        extra={"kl": KL},
    ),
    "sft, LoRA": Kind(singles, SftObjective(), sft_loss, lora=True),
    "dpo, LoRA": Kind(compared_pairs, DPO, dpo_loss, lora=True),
}


def is_scorer(name: str) -> bool:
    """Whether the model has a score head; else it is a causal one."""
    return name == "rm"


def plain_step(name: str, directory: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, and gradient of each trained parameter."""
    auto = AutoModelForSequenceClassification if is_scorer(name) else AutoModelForCausalLM
    model = auto.from_pretrained(directory, attn_implementation="eager")
    if KINDS[name].lora:
        adapt(model)
    loss = KINDS[name].plain(model, KINDS[name].items())
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return loss.item(), {n: p.grad.double().numpy() for n, p in trained.items() if p.grad is not None}


def relative_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """L2 norm of the difference of the whole gradients, over that of the expected one."""
    if found.keys() != expected.keys():
        raise ValueError(f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())}")
    difference, whole = (
        np.sqrt(sum((array**2).sum() for array in arrays))
        for arrays in ([found[name] - expected[name] for name in expected], expected.values())
    )
    return float(difference / whole)


def cut_step(group: Any, name: str, model: str, trainer: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient of the step on a group of ranks (ranks.py), laid out as `trainer` says."""
    kind = KINDS[name]
    return group.run(
        "cut_programs:gradient",
        kind=name.removesuffix(", LoRA"),
        lora=kind.lora,
        model=model,
        items=kind.items(),
        objective=kind.objective,
        extra=kind.extra,
        trainer=trainer,
    )[0]


def errors(found: dict[str, Any], expected: tuple[float, dict[str, np.ndarray]]) -> dict[str, float]:
    loss, gradient = expected
    return {
        "gradient": relative_error(found["gradient"], gradient),
        "loss": abs(found["loss"] - loss) / abs(loss),
    }
