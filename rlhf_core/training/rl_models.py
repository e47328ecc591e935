"""RL's models in their engines: what each starts from, and what of it is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.rl import PpoSettings
from rlhf_core.models.dropout import turn_dropout_off
from rlhf_core.models.lora import add_lora
from rlhf_core.models.policy import Policy, check_head, load_policy
from rlhf_core.models.process_scorer import ProcessScorer, load_process_scorer
from rlhf_core.models.scorer import Scorer, load_scorer
from rlhf_core.training.engine import TORCH_DTYPE, TrainEngine, gathered


@dataclass(frozen=True)
class RlModels:
    """Each method makes an engine of the model in a Hugging Face directory. Every rank makes the same calls."""

    settings: PpoSettings
    pad_token_id: int

    def policy(self, directory: Path) -> TrainEngine:
        settings = self.settings
        return TrainEngine(
            lambda: self._policy(directory),
            dtype=settings.dtype,
            trainer=settings.trainer,
            optimizer=settings.optimizer,
            total_steps=self._updates * (settings.steps - settings.warmup_steps),
            frozen=settings.freeze,
            ema_decay=settings.ema_decay,
        )

    def critic(self, directory: Path) -> TrainEngine:
        settings = self.settings
        assert settings.critic is not None  # the caller has looked
        return TrainEngine(
            lambda: self._critic(directory),
            dtype=settings.dtype,
            trainer=settings.trainer,
            optimizer=settings.critic.optimizer,
            total_steps=self._updates * settings.steps,
            frozen=settings.critic.freeze,
        )

    def reference(self, directory: Path) -> TrainEngine:
        return self._frozen(lambda: load_policy(str(directory), **self._loading))

    def reward(self, directory: Path) -> TrainEngine:
        return self._frozen(lambda: self._scorer(directory))

    def process(self, directory: Path) -> TrainEngine:
        return self._frozen(lambda: self._process(directory))

    @property
    def _updates(self) -> int:
        """Optimizer steps of a rollout."""
        settings = self.settings
        return settings.epochs * settings.rollout.trajectories // settings.batch_size

    @property
    def _loading(self) -> dict[str, Any]:
        """How a model is read from its directory."""
        trainer = self.settings.trainer
        return {
            "dtype": TORCH_DTYPE[self.settings.dtype],
            "attention": trainer.attention,
            "experts": trainer.experts_implementation,
        }

    def _frozen(self, build: Callable[[], torch.nn.Module]) -> TrainEngine:
        return TrainEngine(build, dtype=self.settings.dtype, trainer=self.settings.trainer, optimizer=None)

    def _gathered(self, module: torch.nn.Module, *, modified: bool = False) -> Any:
        return gathered(list(module.parameters()), self.settings.trainer.zero_stage, 0 if modified else None)

    def _policy(self, directory: Path) -> Policy:
        settings = self.settings
        policy = load_policy(str(directory), **self._loading)
        turn_dropout_off(policy)
        with self._gathered(policy.head):
            check_head(policy)
        if settings.lora is not None:
            add_lora(policy.lm, settings.lora, "causal", settings.seed)
        return policy

    def _critic(self, directory: Path) -> Scorer:
        """A head of zeros: values start at 0, whatever scale the reward model's scores have."""
        settings = self.settings
        scorer = self._scorer(directory)
        turn_dropout_off(scorer)
        with self._gathered(scorer.head, modified=True), torch.no_grad():
            scorer.head.weight.zero_()
        if settings.critic is not None and settings.critic.lora is not None:
            add_lora(scorer.lm, settings.critic.lora, "reward", settings.seed)
        return scorer

    def _scorer(self, directory: Path) -> Scorer:
        return load_scorer(str(directory), pad_token_id=self.pad_token_id, **self._loading)

    def _process(self, directory: Path) -> ProcessScorer:
        scorer = load_process_scorer(str(directory), tokens=None, **self._loading)
        with self._gathered(scorer.head):
            check_head(scorer)
        return scorer
