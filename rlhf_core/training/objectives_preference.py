"""Objectives of DPO and KTO. Legend: R rows, L columns, N items. Outputs are log-probs (R, L)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.algorithms.kto import kto_loss
from rlhf_core.algorithms.masked import masked_sum, select
from rlhf_core.algorithms.preference import dpo_loss, ipo_loss
from rlhf_core.config.supervised import DpoSettings, KtoSettings
from rlhf_core.training.batch_views import model_inputs, sample_logprobs, sample_weights
from rlhf_core.training.objective import Batch, LossParts, Metrics, Term


@dataclass(frozen=True)
class DpoObjective:
    """DPO, cDPO or IPO, mean over the pairs of the optimizer step, with the chosen response's NLL where asked for.

    Items are (chosen, rejected); scalars `reference_chosen`, `reference_rejected`: their log-probs under the
    reference, as `sample_logprobs` sums them. The NLL is the mean over a response's tokens, then over the pairs
    (Pang et al. 2024, eq. 1).
    """

    settings: DpoSettings

    def denominators(self, batch: Batch) -> dict[str, float]:
        pairs = float(batch["real"].sum())
        return {"preference": pairs, "nll": pairs} if self.settings.nll_coef else {"preference": pairs}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return model_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        real = batch["real"] > 0
        logprobs = sample_logprobs(batch, outputs, 2)
        reference = torch.stack([batch["reference_chosen"], batch["reference_rejected"]], dim=1)
        log_ratios = logprobs - select(reference, real.unsqueeze(1))
        lengths = sample_weights(batch, 2)
        terms = {"preference": Term(masked_sum(self._preference(log_ratios, lengths), real))}
        metrics = self._metrics(log_ratios.detach(), logprobs.detach(), real)
        if self.settings.nll_coef:
            nll = -(logprobs / lengths)[:, 0].sum()
            terms["nll"] = Term(nll, self.settings.nll_coef)
            metrics["nll"] = (nll.detach(), real.sum())
        return LossParts(terms, metrics)

    def _preference(self, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        """(N,). log_ratios, lengths: (N, 2)."""
        if self.settings.loss == "ipo":
            return ipo_loss(*(log_ratios / lengths).unbind(dim=1), beta=self.settings.beta)
        smoothing = self.settings.label_smoothing
        return dpo_loss(*log_ratios.unbind(dim=1), beta=self.settings.beta, label_smoothing=smoothing)

    def _metrics(self, log_ratios: Tensor, logprobs: Tensor, real: Tensor) -> Metrics:
        pairs = real.sum()
        chosen, rejected = (self.settings.beta * log_ratios).unbind(dim=1)
        return {
            "rewards/chosen": (chosen.sum(), pairs),
            "rewards/rejected": (rejected.sum(), pairs),
            "accuracy": ((chosen > rejected).sum(), pairs),
            "margin": ((chosen - rejected).sum(), pairs),
            "logps/chosen": (logprobs[:, 0].sum(), pairs),
            "logps/rejected": (logprobs[:, 1].sum(), pairs),
        }


@dataclass(frozen=True)
class KtoObjective:
    """KTO, mean over the responses of the optimizer step.

    An item's first sample is the row's own; scalars `label` (1 desirable, 0 not) and `reference`, its log-prob under
    the reference. batch["kl"], the same scalar in every batch of the step, is what `KtoKlObjective` found.
    """

    settings: KtoSettings
    samples_per_item: int = 2

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"kto": float(batch["real"].sum())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return model_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        real, desirable = batch["real"] > 0, batch["label"] > 0.5
        logprobs = sample_logprobs(batch, outputs, self.samples_per_item)[:, 0]
        log_ratios = logprobs - batch["reference"]
        losses = kto_loss(
            log_ratios,
            desirable,
            batch["kl"],
            beta=self.settings.beta,
            desirable_weight=self.settings.desirable_weight,
            undesirable_weight=self.settings.undesirable_weight,
        )
        metrics = self._metrics(batch, log_ratios.detach(), logprobs.detach(), real & desirable, real & ~desirable)
        return LossParts({"kto": Term(masked_sum(losses, real))}, metrics)

    def _metrics(
        self, batch: Batch, log_ratios: Tensor, logprobs: Tensor, desirable: Tensor, undesirable: Tensor
    ) -> Metrics:
        rewards = self.settings.beta * log_ratios
        responses = desirable.sum() + undesirable.sum()
        return {
            "rewards/desirable": (masked_sum(rewards, desirable), desirable.sum()),
            "rewards/undesirable": (masked_sum(rewards, undesirable), undesirable.sum()),
            "logps/desirable": (masked_sum(logprobs, desirable), desirable.sum()),
            "logps/undesirable": (masked_sum(logprobs, undesirable), undesirable.sum()),
            "desirable": (desirable.sum(), responses),
            "kl": (batch["kl"].clamp(min=0) * responses, responses),
        }


@dataclass(frozen=True)
class KtoKlObjective:
    """The step's KL estimate, for a pass without gradient: its metric and its loss are the mean log-ratio.

    An item's last sample is the row's prompt with another row's response; scalar `reference_mismatched`.
    """

    samples_per_item: int = 2

    def denominators(self, batch: Batch) -> dict[str, float]:
        return {"kl": float(batch["real"].sum())}

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor | float]:
        return model_inputs(batch)

    def loss(self, batch: Batch, outputs: Tensor) -> LossParts:
        real = batch["real"] > 0
        mismatched = sample_logprobs(batch, outputs, self.samples_per_item)[:, -1]
        total = (mismatched - select(batch["reference_mismatched"], real)).sum()
        return LossParts({"kl": Term(total)}, {"kl": (total.detach(), real.sum())})
