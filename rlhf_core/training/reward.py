"""Reward models and process reward models, one rank."""

import math
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.supervised import PrmSettings, RmSettings
from rlhf_core.data.placeholders import single_id
from rlhf_core.models.lora import add_lora
from rlhf_core.models.policy import check_head
from rlhf_core.models.process_scorer import StepTokens, load_process_scorer
from rlhf_core.models.scorer import initialise_head, load_scorer
from rlhf_core.training.engine import gathered
from rlhf_core.training.objective import Objective
from rlhf_core.training.objectives_process import PrmObjective
from rlhf_core.training.objectives_reward import RmObjective
from rlhf_core.training.supervised import SupervisedTrainer


class RmTrainer(SupervisedTrainer):
    """Its exports carry mean and standard deviation of the held-out scores under the exported weights.

    So an evaluation has to come between whatever changes the weights and an export.
    """

    settings: RmSettings
    samples_per_item = 2

    def load(self, fresh: bool) -> dict[str, Any]:
        self.statistics: dict[str, float] = {}
        return super().load(fresh)

    def train_step(self) -> dict[str, float]:
        self.statistics = {}
        return super().train_step()

    def end_evaluation(self) -> dict[str, float]:
        metrics = super().end_evaluation()
        self.statistics = score_statistics(metrics)
        return metrics

    def unmeasured(self) -> bool:
        return not self.statistics

    def export(self, directory: str) -> dict[str, Any]:
        """`mean`, `std` and `value_head_prefix` in the config are the names that OpenRLHF reads."""
        self.engine.module.lm.config.update({"value_head_prefix": "score", **self.statistics})
        return {**super().export(directory), "head": {"name": "score", **self.statistics}}

    def _objective(self) -> Objective:
        return RmObjective(self.settings)

    def _build(self) -> torch.nn.Module:
        settings = self.settings
        scorer = load_scorer(str(self.model_dir), pad_token_id=self.tokenizer.pad_token_id, **self._loading())
        with gathered([scorer.head.weight], settings.trainer.zero_stage, modifier_rank=0):
            initialise_head(scorer, settings.seed)
        if settings.lora is not None:
            add_lora(scorer.lm, settings.lora, "reward", settings.seed)
        return scorer

    def _restore(self, directory: Path) -> None:
        super()._restore(directory)
        self.statistics = {}


def score_statistics(metrics: dict[str, float]) -> dict[str, float]:
    """Mean and standard deviation of the scores, chosen and rejected together."""
    mean = metrics["score"]
    variance = max(0.0, metrics["score squared"] - mean**2)
    return {"mean": mean, "std": max(math.sqrt(variance), 1e-8)}


class PrmTrainer(SupervisedTrainer):
    settings: PrmSettings

    def _objective(self) -> Objective:
        return PrmObjective(self.settings)

    def _build(self) -> torch.nn.Module:
        settings = self.settings
        scorer = load_process_scorer(str(self.model_dir), tokens=self._step_tokens(), **self._loading())
        with gathered(list(scorer.head.parameters()), settings.trainer.zero_stage):
            check_head(scorer)
        if settings.lora is not None:
            add_lora(scorer.lm, settings.lora, "causal", settings.seed)
        return scorer

    def _step_tokens(self) -> StepTokens:
        settings = self.settings
        placeholder = single_id(self.tokenizer, settings.placeholder_token, "placeholder_token")
        verdicts = tuple(single_id(self.tokenizer, token, "reward_tokens") for token in settings.reward_tokens)
        text = settings.text
        template = text.input_template if text.format == "template" else None
        return StepTokens(placeholder, verdicts, settings.separator, template)
