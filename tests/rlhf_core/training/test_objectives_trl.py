"""Objectives against TRL's own loss functions, in float64, on one batch.

TRL's trainers compute their loss in one method, which is called here on an object that has the trainer's settings and
nothing else: the log-probs or scores that its model would put out are given. TRL has no process reward model, no cDPO
for batches and no NLL by sequence; what of them it has for a single pair (`aot`, `sft`) is compared pair by pair.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_core.config.supervised import DpoSettings, KtoSettings, RmSettings
from rlhf_core.data.layout import Layout, make_batch
from rlhf_core.data.samples import Item, Sample
from rlhf_core.training.objectives_preference import DpoObjective, KtoKlObjective, KtoObjective
from rlhf_core.training.objectives_reward import RmObjective

pytestmark = pytest.mark.engines  # its imports take seconds

ITEMS = 6
COMMON = {"optimizer": {"lr": 1e-3}, "batch_size": 8, "max_len": 64, "epochs": 1}
LAYOUT = Layout(ranks=1, micro_batch_size=8, packing=False, capacity=64)


def trl_trainer(**settings: Any) -> Any:
    """What a loss method of TRL looks up on its trainer."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def draw_items(samples: int, *names: str) -> list[Item]:
    rng = np.random.default_rng(0)

    def sample() -> Sample:
        tokens = int(rng.integers(3, 15))
        prompt = int(rng.integers(1, tokens - 1))
        return Sample(np.ones(tokens, np.int32), (np.arange(tokens) >= prompt).astype(np.float32))

    def scalar() -> float:
        return float(np.float32(4 * rng.normal()))

    return [Item(tuple(sample() for _ in range(samples)), {name: scalar() for name in names}) for _ in range(ITEMS)]


def batch_of(items: list[Item]) -> dict[str, Tensor]:
    batch = make_batch(items, [[number] for number in range(len(items))], LAYOUT, 0)
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def draw_logprobs(batch: dict[str, Tensor]) -> Tensor:
    shape = batch["weights"].shape
    return (-3 * torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).requires_grad_()


def trl_model(logprobs: Tensor, mask: Tensor) -> Any:
    """TRL's fused head puts out the log-probs of tokens 1 and on, 0 outside the completion."""
    out = torch.where(mask.bool(), logprobs, 0.0)[:, 1:]
    zeros = torch.zeros_like(out)
    outputs = SimpleNamespace(log_probs=out, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    return lambda **_: outputs


def our_loss(objective: Any, batch: dict[str, Tensor], outputs: Tensor) -> tuple[Tensor, dict[str, float]]:
    parts, totals = objective.loss(batch, outputs), objective.denominators(batch)
    loss = torch.stack([term.weight * term.numerator / totals[name] for name, term in parts.terms.items()]).sum()
    return loss, {name: float(total) / float(count) for name, (total, count) in parts.metrics.items()}


def assert_same(ours: Tensor, theirs: Tensor, outputs: Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-10)
    gradients = [torch.autograd.grad(loss, outputs)[0] for loss in (ours, theirs)]
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


@pytest.mark.parametrize("use_margin", [False, True])
@pytest.mark.parametrize("centering_coef", [0.0, 0.3])
def test_reward_model(use_margin: bool, centering_coef: float) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    batch = batch_of(draw_items(2, "margin"))
    scores = draw_logprobs(batch)
    last = torch.stack(
        [row[int((segment >= 0).sum()) - 1] for row, segment in zip(scores, batch["segments"], strict=True)]
    )
    # Ours are chosen and rejected in turn, TRL's all chosen and then all rejected.
    logits = torch.cat([last[0::2], last[1::2]]).unsqueeze(1)
    trainer = trl_trainer(args=SimpleNamespace(center_rewards_coefficient=centering_coef or None))
    inputs = {"attention_mask": torch.ones(2 * ITEMS, 3)} | ({"margin": batch["margin"]} if use_margin else {})
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)
    settings = RmSettings(**COMMON, use_margin=use_margin, centering_coef=centering_coef)
    ours, metrics = our_loss(RmObjective(settings), batch, scores)
    assert_same(ours, theirs, scores)
    reported = trainer._metrics["train"]
    assert metrics["accuracy"] == pytest.approx(reported["accuracy"][0])
    assert metrics["margin"] == pytest.approx(reported["margin"][0])
    assert metrics["score"] == pytest.approx(reported["mean_reward"][0])


def trl_dpo(batch: dict[str, Tensor], logprobs: Tensor, beta: float, losses: dict[str, float], **more: Any) -> Any:
    """TRL's loss of one batch, whose rows are in turn chosen and rejected, and its metrics."""
    from trl.trainer.dpo_trainer import DPOTrainer

    order = [*range(0, len(logprobs), 2), *range(1, len(logprobs), 2)]
    mask = batch["weights"][order] > 0
    trainer = trl_trainer(
        beta=beta,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        use_weighting=False,
        **more,
    )
    inputs = {
        "input_ids": batch["input_ids"][order],
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask.long(),
        "ref_chosen_logps": batch["reference_chosen"],
        "ref_rejected_logps": batch["reference_rejected"],
    }
    loss = DPOTrainer._compute_loss(trainer, trl_model(logprobs[order], mask), inputs, False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_and_ipo(loss: Any) -> None:
    batch = batch_of(draw_items(2, "reference_chosen", "reference_rejected"))
    logprobs = draw_logprobs(batch)
    theirs, reported = trl_dpo(batch, logprobs, 0.3, {loss: 1.0})
    ours, metrics = our_loss(DpoObjective(DpoSettings(**COMMON, loss=loss, beta=0.3)), batch, logprobs)
    assert_same(ours, theirs, logprobs)
    names = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
    for name, value in metrics.items():
        assert value == pytest.approx(reported[names.get(name, name)]), name


def test_smoothed_dpo_with_nll_pair_by_pair() -> None:
    items = draw_items(2, "reference_chosen", "reference_rejected")
    settings = DpoSettings(**COMMON, beta=0.3, label_smoothing=0.2, nll_coef=0.7)
    for item in items:
        batch = batch_of([item])
        logprobs = draw_logprobs(batch)
        theirs, _ = trl_dpo(batch, logprobs, 0.3, {"aot": 1.0, "sft": 0.7}, label_smoothing=0.2)
        assert_same(our_loss(DpoObjective(settings), batch, logprobs)[0], theirs, logprobs)


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_kto(shift: float) -> None:
    """With a KL estimate below 0, and with one above."""
    from trl.trainer.kto_trainer import KTOTrainer

    items = draw_items(2, "label", "reference", "reference_mismatched")
    batch = batch_of(items)
    batch["label"] = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    batch["reference_mismatched"] -= shift
    logprobs = draw_logprobs(batch)
    own, other = slice(0, None, 2), slice(1, None, 2)
    trainer = trl_trainer(
        beta=0.3,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=1.25,
        undesirable_weight=0.5,
        _compute_kl_logps=lambda *_: (logprobs * batch["weights"])[other].sum(dim=1),
    )
    inputs = {
        "input_ids": batch["input_ids"][own],
        "attention_mask": torch.ones_like(batch["weights"][own]),
        "completion_mask": batch["weights"][own].long(),
        "label": batch["label"].bool(),
        "ref_logps": batch["reference"],
        "ref_KL_logps": batch["reference_mismatched"],
    }
    theirs = KTOTrainer._compute_loss(trainer, trl_model(logprobs[own], batch["weights"][own]), inputs, False)
    kl, _ = our_loss(KtoKlObjective(), batch, logprobs.detach())
    assert (kl > 0) == (shift > 0)
    settings = KtoSettings(**COMMON, beta=0.3, desirable_weight=1.25, undesirable_weight=0.5)
    ours, metrics = our_loss(KtoObjective(settings), {**batch, "kl": kl}, logprobs)
    assert_same(ours, theirs, logprobs)
    reported = {name: values[0] for name, values in trainer._metrics["train"].items() if values}
    assert metrics["kl"] == pytest.approx(reported["kl"])
    for ours_name, theirs_name in (("desirable", "chosen"), ("undesirable", "rejected")):
        assert metrics[f"rewards/{ours_name}"] == pytest.approx(reported[f"rewards/{theirs_name}"])
        assert metrics[f"logps/{ours_name}"] == pytest.approx(reported[f"logps/{theirs_name}"])
