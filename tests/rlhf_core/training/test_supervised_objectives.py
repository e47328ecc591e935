"""Objectives of SFT, RM, PRM, DPO and KTO against plain PyTorch, written here sample by sample, in float64.

Every layout of the same items has to give the same loss, gradient and metrics as the plain form, which knows no batch.
What a model puts out where nothing is read is NaN throughout, and so are the outputs of fill.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_core.config.supervised import DpoSettings, KtoSettings, PrmSettings, RmSettings
from rlhf_core.data.layout import Layout, make_batch, plan_step
from rlhf_core.data.samples import Item, Sample
from rlhf_core.training.batch_views import sample_logprobs
from rlhf_core.training.objectives_aux import AuxLossObjective
from rlhf_core.training.objectives_preference import DpoObjective, KtoKlObjective, KtoObjective
from rlhf_core.training.objectives_process import PrmObjective, calibration_error
from rlhf_core.training.objectives_reward import RmObjective
from rlhf_core.training.objectives_sft import SftObjective

NAN = math.nan
ITEMS = 7
SIDES = ("chosen", "rejected")
KL = 0.7
COMMON = {"optimizer": {"lr": 1e-3}, "batch_size": 8, "max_len": 64, "epochs": 1}
PRM = {**COMMON, "placeholder_token": "*", "reward_tokens": ("+", "-")}
LAYOUTS = {
    "padded, all at once": Layout(ranks=1, micro_batch_size=8, packing=False, capacity=96),
    "padded, one by one": Layout(ranks=1, micro_batch_size=1, packing=False, capacity=96),
    "padded, 2 ranks by 2": Layout(ranks=2, micro_batch_size=2, packing=False, capacity=96),
    "padded, 3 ranks, multiple of 8": Layout(ranks=3, micro_batch_size=1, packing=False, capacity=96, multiple=8),
    "packed, a row": Layout(ranks=1, micro_batch_size=1, packing=True, capacity=96),
    "packed, rows of 2 ranks": Layout(ranks=2, micro_batch_size=2, packing=True, capacity=96),
}
Metrics = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Case:
    """Items, what a model puts out for each token of each of their samples, and the plain form of the step."""

    objective: Any
    items: list[Item]
    outputs: list[list[Tensor]]
    plain: Callable[[list[Item], list[list[Tensor]]], tuple[Tensor, Metrics]]

    def expected(self) -> tuple[Tensor, list[Tensor], Metrics]:
        loss, metrics = self.plain(self.items, self.outputs)
        leaves = [values for item in self.outputs for values in item]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return (
            loss,
            [g if g is not None else torch.zeros_like(v) for g, v in zip(gradients, leaves, strict=True)],
            metrics,
        )


@dataclass(frozen=True)
class Step:
    loss: Tensor
    gradients: list[Tensor]
    metrics: Metrics


def to_float64(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def outputs_in(batch: dict[str, Tensor], outputs: Sequence[Sequence[Tensor]]) -> Tensor:
    """What the model puts out for a batch of these items: their samples' values, NaN on fill."""
    tail = outputs[0][0].shape[1:]
    out = torch.full((*batch["segments"].shape, *tail), NAN, dtype=torch.float64)
    for number, values in enumerate(values for item in outputs for values in item):
        out[batch["segments"] == number] = values
    return out


def run(case: Case, batches: Sequence[tuple[dict[str, Tensor], Tensor]]) -> Step:
    """The engine's part: denominators of the whole step first, then the sum over micro-batches."""
    totals: dict[str, float] = {}
    for batch, _ in batches:
        for name, value in case.objective.denominators(batch).items():
            totals[name] = totals.get(name, 0.0) + value
    loss, metrics = torch.zeros((), dtype=torch.float64), {}
    for batch, outputs in batches:
        parts = case.objective.loss(batch, outputs)
        assert set(parts.terms) == set(totals)
        for name, term in parts.terms.items():
            loss = loss + term.weight * term.numerator / totals[name]
        for name, (total, count) in parts.metrics.items():
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + float(total), before[1] + float(count))
    leaves = [values for item in case.outputs for values in item]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    filled = [g if g is not None else torch.zeros_like(v) for g, v in zip(gradients, leaves, strict=True)]
    return Step(loss.detach(), filled, metrics)


def lay_out(case: Case, layout: Layout) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Micro-batches of all ranks with their outputs; those of ranks without an item put out NaN."""
    made = []
    for rank in plan_step([item.tokens for item in case.items], layout):
        for micro in rank:
            numbers = [number for row in micro for number in row]
            batch = to_float64(make_batch(case.items, micro, layout, 0))
            batch["kl"] = torch.tensor(KL, dtype=torch.float64)
            given = [case.outputs[number] for number in numbers]
            nothing = [[torch.full_like(values, NAN) for values in case.outputs[0]]]
            made.append((batch, outputs_in(batch, given or nothing)))
    return made


# -- items and what the model puts out for them ------------------------------------------------------------------


def draw_items(rng: np.random.Generator, samples: int, *, fractions: bool = False) -> list[Item]:
    """Samples of 3 to 14 tokens: a prompt, and a response whose tokens have weight 1 or, with fractions, others."""

    def sample() -> Sample:
        tokens = int(rng.integers(3, 15))
        prompt = int(rng.integers(1, tokens - 1))
        weights = np.zeros(tokens, np.float32)
        weights[prompt:] = rng.choice([0.25, 0.5, 2.0], tokens - prompt) if fractions else 1.0
        return Sample(rng.integers(1, 30, tokens).astype(np.int32), weights)

    return [Item(tuple(sample() for _ in range(samples))) for _ in range(ITEMS)]


def with_scalars(rng: np.random.Generator, items: list[Item], *names: str) -> list[Item]:
    """Scalars that float32 holds exactly, as batches do."""
    return [Item(item.samples, {name: float(np.float32(4 * rng.normal())) for name in names}) for item in items]


def leaf(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def draw_logprobs(rng: np.random.Generator, items: list[Item]) -> list[list[Tensor]]:
    return [[leaf(np.where(s.weights > 0, -3 * rng.random(len(s)), NAN)) for s in item.samples] for item in items]


def draw_scores(rng: np.random.Generator, items: list[Item]) -> list[list[Tensor]]:
    return [[leaf(np.append(np.full(len(s) - 1, NAN), 2 * rng.normal())) for s in item.samples] for item in items]


def response_logprob(sample: Sample, logprobs: Tensor) -> Tensor:
    return sum((logprobs[t] for t in range(len(sample)) if sample.weights[t] > 0), torch.zeros(()))


# -- the objectives, plainly -------------------------------------------------------------------------------------


def sft_case() -> Case:
    def plain(items: list[Item], outputs: list[list[Tensor]]) -> tuple[Tensor, Metrics]:
        total, weight = torch.zeros(()), 0.0
        for item, (logprobs,) in zip(items, outputs, strict=True):
            for token, w in enumerate(item.samples[0].weights.tolist()):
                if w > 0:
                    total, weight = total - w * logprobs[token], weight + w
        return total / weight, {"nll": (total.item(), weight)}

    rng = np.random.default_rng(1)
    items = draw_items(rng, 1, fractions=True)
    return Case(SftObjective(), items, draw_logprobs(rng, items), plain)


def rm_case(**settings: Any) -> Case:
    given = RmSettings(**COMMON, **settings)

    def plain(items: list[Item], outputs: list[list[Tensor]]) -> tuple[Tensor, Metrics]:
        loss, pairs = torch.zeros(()), [(chosen[-1], rejected[-1]) for chosen, rejected in outputs]
        for item, (chosen, rejected) in zip(items, pairs, strict=True):
            margin = item.scalars["margin"] if given.use_margin else 0.0
            loss = loss + torch.log(1 + torch.exp(-(chosen - rejected - margin)))
            loss = loss + given.centering_coef * (chosen + rejected) ** 2
        scores = [side.item() for pair in pairs for side in pair]
        margins = [(chosen - rejected).item() for chosen, rejected in pairs]
        return loss / len(pairs), {
            "accuracy": (sum(m > 0 for m in margins), len(pairs)),
            "margin": (sum(margins), len(pairs)),
            "score": (sum(scores), len(scores)),
            "score squared": (sum(s * s for s in scores), len(scores)),
        }

    rng = np.random.default_rng(2)
    items = with_scalars(rng, draw_items(rng, 2), "margin")
    return Case(RmObjective(given), items, draw_scores(rng, items), plain)


def prm_case(**settings: Any) -> Case:
    given = PrmSettings(**{**PRM, **settings})
    tokens, soft = len(given.reward_tokens), given.labels == "soft"

    def plain(items: list[Item], outputs: list[list[Tensor]]) -> tuple[Tensor, Metrics]:
        metrics: Metrics = {}

        def add(name: str, total: float, count: float) -> None:
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + total, before[1] + count)

        losses, bins = [], []
        for item, (logits,) in zip(items, outputs, strict=True):
            (sample,) = item.samples
            for step, at in enumerate(np.flatnonzero(sample.weights), start=1):
                share = torch.exp(logits[at]) / torch.exp(logits[at]).sum()
                label = float(sample.labels[at])
                target = [label, 1 - label] if soft else [float(k == label) for k in range(tokens)]
                losses.append(-sum(y * torch.log(p) for y, p in zip(target, share, strict=True)))
                right = float(np.argmax(share.detach().numpy()) == np.argmax(target))
                place = str(step) if step < 9 else "9+"
                add("accuracy", right, 1)
                add(f"step accuracy/{place}", right, 1)
                add(f"step probability/{place}", share[0].item(), 1)
                add(f"step label/{place}", target[0], 1)
                bins.append(int(share[0].item() * 10))
                add(f"bin probability/{bins[-1]}", share[0].item(), 1)
                add(f"bin label/{bins[-1]}", target[0], 1)
        loss = torch.stack(losses)
        add("nll", loss.sum().item(), len(losses))
        for number in range(10):
            add(f"bin share/{number}", bins.count(number), len(bins))
        return loss.mean(), metrics

    rng = np.random.default_rng(3)
    items = [
        Item((draw_steps(rng, 12 if number == 0 else int(rng.integers(1, 9)), tokens, soft=soft),))
        for number in range(ITEMS)
    ]
    outputs = [
        [leaf(np.where(s.weights[:, None] > 0, 2 * rng.normal(size=(len(s), tokens)), NAN))]
        for s in (item.samples[0] for item in items)
    ]
    return Case(PrmObjective(given), items, outputs, plain)


def draw_steps(rng: np.random.Generator, steps: int, tokens: int, *, soft: bool) -> Sample:
    """A prompt of 2 tokens, then steps of 1 to 5 tokens, the last of which is the placeholder."""
    ends = 1 + np.cumsum(rng.integers(1, 6, steps))
    weights, labels = np.zeros(ends[-1] + 1, np.float32), np.full(ends[-1] + 1, NAN, np.float32)
    weights[ends] = 1
    labels[ends] = rng.random(steps) if soft else rng.integers(tokens, size=steps)
    return Sample(np.ones(len(weights), np.int32), weights, labels)


def dpo_case(**settings: Any) -> Case:
    given = DpoSettings(**COMMON, **settings)
    beta, smoothing = given.beta, given.label_smoothing

    def plain(items: list[Item], outputs: list[list[Tensor]]) -> tuple[Tensor, Metrics]:
        loss, rows = torch.zeros(()), []
        for item, pair in zip(items, outputs, strict=True):
            logps = [response_logprob(s, values) for s, values in zip(item.samples, pair, strict=True)]
            lengths = [int((s.weights > 0).sum()) for s in item.samples]
            ratios = [logp - item.scalars[f"reference_{side}"] for logp, side in zip(logps, SIDES, strict=True)]
            if given.loss == "ipo":
                loss = loss + (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2
            else:
                right = 1 / (1 + torch.exp(-beta * (ratios[0] - ratios[1])))
                loss = loss - (1 - smoothing) * torch.log(right) - smoothing * torch.log(1 - right)
            loss = loss - given.nll_coef * logps[0] / lengths[0]
            rows.append([r.item() for r in (beta * ratios[0], beta * ratios[1], *logps, -logps[0] / lengths[0])])
        chosen, rejected, logps_chosen, logps_rejected, nll = np.array(rows).T
        return loss / len(items), {
            **({"nll": (nll.sum(), len(rows))} if given.nll_coef else {}),
            "rewards/chosen": (chosen.sum(), len(rows)),
            "rewards/rejected": (rejected.sum(), len(rows)),
            "accuracy": ((chosen > rejected).sum(), len(rows)),
            "margin": ((chosen - rejected).sum(), len(rows)),
            "logps/chosen": (logps_chosen.sum(), len(rows)),
            "logps/rejected": (logps_rejected.sum(), len(rows)),
        }

    rng = np.random.default_rng(4)
    items = with_scalars(rng, draw_items(rng, 2), "reference_chosen", "reference_rejected")
    return Case(DpoObjective(given), items, draw_logprobs(rng, items), plain)


def kto_case(samples: int = 2) -> Case:
    given = KtoSettings(**COMMON, beta=0.3, desirable_weight=1.25, undesirable_weight=0.5)

    def plain(items: list[Item], outputs: list[list[Tensor]]) -> tuple[Tensor, Metrics]:
        loss, rows = torch.zeros(()), []
        for item, (own, *_) in zip(items, outputs, strict=True):
            logp = response_logprob(item.samples[0], own)
            gain = given.beta * (logp - item.scalars["reference"] - KL)
            good = item.scalars["label"] == 1
            value = 1 / (1 + torch.exp(-gain if good else gain))
            loss = loss + (1.25 if good else 0.5) * (1 - value)
            rows.append((good, given.beta * (logp.item() - item.scalars["reference"]), logp.item()))
        metrics = {"desirable": (sum(row[0] for row in rows), len(rows)), "kl": (KL * len(rows), len(rows))}
        for name, wanted in (("desirable", True), ("undesirable", False)):
            of_kind = [row for row in rows if row[0] == wanted]
            metrics[f"rewards/{name}"] = (sum(row[1] for row in of_kind), len(of_kind))
            metrics[f"logps/{name}"] = (sum(row[2] for row in of_kind), len(of_kind))
        return loss / len(items), metrics

    rng = np.random.default_rng(5)
    items = with_scalars(rng, draw_items(rng, samples), "label", "reference", "reference_mismatched")
    items = [Item(item.samples, {**item.scalars, "label": float(n % 3 > 0)}) for n, item in enumerate(items)]
    return Case(KtoObjective(given, samples), items, draw_logprobs(rng, items), plain)


def kto_kl_case(samples: int = 2) -> Case:
    def plain(items: list[Item], outputs: list[list[Tensor]]) -> tuple[Tensor, Metrics]:
        ratios = [
            response_logprob(item.samples[-1], values[-1]) - item.scalars["reference_mismatched"]
            for item, values in zip(items, outputs, strict=True)
        ]
        total = torch.stack(ratios).sum()
        return total / len(items), {"kl": (total.item(), len(items))}

    case = kto_case(samples)
    return Case(KtoKlObjective(samples), case.items, case.outputs, plain)


CASES: dict[str, Callable[[], Case]] = {
    "sft": sft_case,
    "rm sigmoid": rm_case,
    "rm margin, centering": lambda: rm_case(use_margin=True, centering_coef=0.3),
    "rm log_exp": lambda: rm_case(loss="log_exp"),
    "prm hard": prm_case,
    "prm hard, three tokens": lambda: prm_case(reward_tokens=("+", "-", "?")),
    "prm soft": lambda: prm_case(labels="soft"),
    "dpo": dpo_case,
    "dpo smoothed, nll": lambda: dpo_case(beta=0.4, label_smoothing=0.2, nll_coef=0.7),
    "ipo": lambda: dpo_case(loss="ipo", beta=0.5),
    "ipo, nll": lambda: dpo_case(loss="ipo", nll_coef=0.2),
    "kto": kto_case,
    "kto, own sample alone": lambda: kto_case(samples=1),
    "kto kl": kto_kl_case,
    "kto kl, mismatched sample alone": lambda: kto_kl_case(samples=1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_loss_gradient_and_metrics_are_those_of_the_plain_form_in_every_layout(
    make: Callable[[], Case], layout: Layout
) -> None:
    case = make()
    loss, gradients, metrics = case.expected()
    got = run(case, lay_out(case, layout))
    assert got.loss.item() == pytest.approx(loss.item(), abs=1e-10)
    for ours, plain in zip(got.gradients, gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-10)
    counted = {name: pair for name, pair in got.metrics.items() if pair[1] > 0}
    assert set(counted) == {name for name, pair in metrics.items() if pair[1] > 0}
    for name, pair in counted.items():
        assert pair == pytest.approx(metrics[name], abs=1e-10), name


def test_the_layouts_hold_fill_micro_batches_and_rows_of_several_items() -> None:
    for make in (sft_case, dpo_case):
        batches = [batch for layout in LAYOUTS.values() for batch, _ in lay_out(make(), layout)]
        assert any(batch["real"].sum() == 0 for batch in batches)
        assert any(len(batch["real"]) > len(batch["segments"]) for batch in batches)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_an_item_that_is_not_real_counts_nowhere(make: Callable[[], Case]) -> None:
    """Even with weights, and with NaN for every output and scalar of it."""
    case = make()
    layout = LAYOUTS["padded, all at once"]
    alone = [lay_out(Case(case.objective, case.items[:1], case.outputs[:1], case.plain), layout)[0]]
    beside = to_float64(make_batch(case.items, [[0], [1]], layout, 0))
    beside["real"][1] = 0
    for name in case.items[0].scalars:
        beside[name][1] = NAN
    beside["kl"] = alone[0][0]["kl"]
    poisoned = [case.outputs[0], [torch.full_like(values, NAN) for values in case.outputs[1]]]
    expected, got = run(case, alone), run(case, [(beside, outputs_in(beside, poisoned))])
    assert torch.equal(got.loss, expected.loss)
    assert got.metrics == expected.metrics
    for ours, other in zip(got.gradients, expected.gradients, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_nan_at_any_place_that_is_read_shows(make: Callable[[], Case]) -> None:
    case = make()
    _, gradients, _ = case.expected()
    leaves = [values for item in case.outputs for values in item]
    read = [(number, *at) for number, gradient in enumerate(gradients) for at in gradient.nonzero().tolist()]
    assert len(read) >= ITEMS
    for number, *at in read:
        kept = leaves[number].detach()[tuple(at)].clone()
        with torch.no_grad():
            leaves[number][tuple(at)] = NAN
            ((batch, outputs),) = lay_out(case, LAYOUTS["padded, all at once"])
            parts = case.objective.loss(batch, outputs)
            leaves[number][tuple(at)] = kept
        assert any(torch.isnan(term.numerator) for term in parts.terms.values()), (number, at)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_metrics_have_the_same_names_without_anything_real(make: Callable[[], Case]) -> None:
    """All ranks of a step sum the same names, whatever they hold."""
    case = make()
    ((batch, outputs),) = lay_out(case, LAYOUTS["padded, all at once"])
    full = case.objective.loss(batch, outputs)
    empty_batch = {**batch, "real": torch.zeros_like(batch["real"]), "weights": torch.zeros_like(batch["weights"])}
    empty = case.objective.loss(empty_batch, outputs)
    assert set(empty.metrics) == set(full.metrics)
    assert all(float(total) == 0 == float(count) for total, count in empty.metrics.values())
    assert set(case.objective.denominators(empty_batch).values()) == {0.0}
    # Such a rank takes part in the backward pass as well.
    assert all(term.numerator.requires_grad and term.numerator.item() == 0 for term in empty.terms.values())


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_model_gets_tokens_and_positions(make: Callable[[], Case]) -> None:
    case = make()
    ((batch, _),) = lay_out(case, LAYOUTS["padded, all at once"])
    assert set(case.objective.forward_inputs(batch)) == {"input_ids", "position_ids"}
    assert all(batch[name] is value for name, value in case.objective.forward_inputs(batch).items())


# -- reference, auxiliary loss, calibration ----------------------------------------------------------------------


def test_dpo_at_the_reference_is_log_2_with_rewards_of_0() -> None:
    """The reference's log-probs are those that `sample_logprobs` gives for the same outputs, in another layout."""
    case = dpo_case()
    references: dict[int, Tensor] = {}
    for micro in ([[0, 3], [1]], [[2, 4, 5, 6]]):
        numbers = [number for row in micro for number in row]
        batch = to_float64(make_batch(case.items, micro, LAYOUTS["packed, a row"], 0))
        sums = sample_logprobs(batch, outputs_in(batch, [case.outputs[number] for number in numbers]), 2)
        references.update(zip(numbers, sums.detach(), strict=True))
    batch = to_float64(make_batch(case.items, [[number] for number in range(ITEMS)], LAYOUTS["padded, all at once"], 0))
    stacked = torch.stack([references[number] for number in range(ITEMS)])
    batch |= {"reference_chosen": stacked[:, 0], "reference_rejected": stacked[:, 1]}
    parts = case.objective.loss(batch, outputs_in(batch, case.outputs))
    assert parts.terms["preference"].numerator.item() == pytest.approx(ITEMS * math.log(2), abs=1e-12)
    assert parts.metrics["rewards/chosen"][0] == pytest.approx(0, abs=1e-12)


def test_kto_reports_the_kl_as_it_enters_the_loss() -> None:
    case = kto_case()
    ((batch, outputs),) = lay_out(case, LAYOUTS["padded, all at once"])
    total, count = case.objective.loss({**batch, "kl": torch.tensor(-2.0)}, outputs).metrics["kl"]
    assert (float(total), float(count)) == (0.0, ITEMS)


def test_aux_loss_is_the_mean_over_the_micro_batches_that_hold_something() -> None:
    case = sft_case()
    objective = AuxLossObjective(case.objective, coef=0.01)
    wrapped = Case(objective, case.items, case.outputs, case.plain)
    batches = lay_out(case, LAYOUTS["padded, 2 ranks by 2"])
    real = [bool(batch["real"].any()) for batch, _ in batches]
    assert real.count(False) == 0
    spare = to_float64(make_batch(case.items, [], LAYOUTS["padded, 2 ranks by 2"], 0))
    batches.append((spare, outputs_in(spare, [[torch.full_like(case.outputs[0][0], NAN)]])))
    aux = [leaf(np.array(value)) for value in (1.0, 2.0, 4.0, 8.0, NAN)]
    assert len(aux) == len(batches)
    got = run(wrapped, [(batch, (outputs, one)) for (batch, outputs), one in zip(batches, aux, strict=True)])
    loss, gradients, _ = case.expected()
    assert got.loss.item() == pytest.approx(loss.item() + 0.01 * 15 / 4, abs=1e-12)
    assert got.metrics["aux"] == (15.0, 4.0)
    for ours, plain in zip(got.gradients, gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-10)
    numerators = [objective.loss(b, (o, a)).terms["aux"].numerator for (b, o), a in zip(batches, aux, strict=True)]
    gradients = torch.autograd.grad(torch.stack(numerators).sum(), aux)
    assert [gradient.item() for gradient in gradients] == [1, 1, 1, 1, 0]


def test_calibration_error_from_the_steps_themselves() -> None:
    case = prm_case(labels="soft")
    shares, labels = [], []
    for item, (logits,) in zip(case.items, case.outputs, strict=True):
        at = np.flatnonzero(item.samples[0].weights)
        shares.extend(torch.softmax(logits[at], dim=-1)[:, 0].tolist())
        labels.extend(item.samples[0].labels[at].tolist())
    expected = 0.0
    for number in range(10):
        inside = [i for i, share in enumerate(shares) if number / 10 <= share < (number + 1) / 10]
        # share of the bin * |mean - mean| = |sum - sum| / steps
        expected += abs(sum(shares[i] - labels[i] for i in inside)) / len(shares)
    got = run(case, lay_out(case, LAYOUTS["packed, a row"])).metrics
    means = {name: total / count for name, (total, count) in got.items() if count > 0}
    assert expected > 0.05
    assert calibration_error(means) == pytest.approx(expected, abs=1e-12)


def test_certain_and_unreadable_predictions_have_a_bin() -> None:
    """P(right) = 1 belongs to the last bin; a NaN shows in the sums instead of ending in an error of indices."""
    case = prm_case()
    ((batch, outputs),) = lay_out(case, LAYOUTS["padded, all at once"])
    certain = torch.stack([torch.full(outputs.shape[:2], 90.0), torch.full(outputs.shape[:2], -90.0)], dim=-1)
    steps = sum(int(item.samples[0].weights.sum()) for item in case.items)
    metrics = case.objective.loss(batch, certain).metrics
    assert metrics["bin share/9"] == (steps, steps)
    metrics = case.objective.loss(batch, torch.full_like(outputs, NAN)).metrics
    assert any(math.isnan(metrics[f"bin probability/{number}"][0]) for number in range(10))
