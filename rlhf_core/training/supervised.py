"""Supervised training, one rank of it: what all of its stages share, and SFT. supervised_loop.py drives a group."""

import json
import math
import shutil
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.supervised import SftSettings, SupervisedSettings
from rlhf_core.data.batches import SampleOrder
from rlhf_core.data.layout import Layout, make_batch, plan_step
from rlhf_core.data.samples import Item
from rlhf_core.models.export import ADAPTER_DIRECTORY, BaseName
from rlhf_core.models.lora import add_lora, nf4_config
from rlhf_core.models.policy import Policy, check_head, load_policy
from rlhf_core.models.tokenizer import GENERATION, load_tokenizer, stop_token_ids, tokenizer_facts, write_stop_token_ids
from rlhf_core.training.engine import TORCH_DTYPE, TrainEngine, gathered, means
from rlhf_core.training.evaluation import Evaluation
from rlhf_core.training.mesh import mesh_of
from rlhf_core.training.objective import Batch, Objective
from rlhf_core.training.objectives_aux import AuxLossObjective
from rlhf_core.training.objectives_sft import SftObjective
from rlhf_core.training.rank import Job, TrainerRank, base_model_directory


class SupervisedTrainer(TrainerRank):
    """One rank. The data's position is stored, not derived from steps."""

    samples_per_item = 1
    evaluation_passes = 1

    def __init__(self, rank: int, ranks: int, job: Job):
        super().__init__(rank, ranks, job)
        self.settings: SupervisedSettings = job.settings
        self.mesh = mesh_of(self.settings.trainer, rank)
        model = self.settings.model
        self._base = base_model_directory(model, job.scratch, rank) if model is not None else None

    def load(self, fresh: bool) -> dict[str, Any]:
        """Loads data and model. Returns the number of optimizer steps in all, of held-out rows, and of rows that a
        reference has to look at before training (`ReferenceTrainer.refer`).

        fresh: no training checkpoint will be restored, so what depends on the first weights is still to be computed.
        """
        settings = self.settings
        torch.manual_seed(settings.seed + self.rank)
        self.model_dir = self._base or self.job.input_path("model") / "model"
        self.tokenizer = load_tokenizer(self.model_dir)
        # Exports carry the template that the model was trained with.
        self.tokenizer.chat_template = self.job.chat_template or self.tokenizer.chat_template
        self.tables = self.job.token_tables()
        rows = len(self.tables["train"])
        self.order = SampleOrder(rows, settings.seed)
        self.position = 0
        self.total_steps = total_steps(settings, rows)
        objective = self._objective()
        coef = settings.aux_loss_coef
        self.objective = AuxLossObjective(objective, coef) if coef else objective
        self.engine = self._first_engine(fresh)
        return {
            "total_steps": self.total_steps,
            "eval_rows": len(self.tables["eval"]) if "eval" in self.tables else 0,
            "reference_rows": 0,
        }

    def train_step(self) -> dict[str, float]:
        """The next optimizer step."""
        ids = self.order.ids(self.position, self.settings.batch_size)
        result = self.engine.step(self._micro_batches(self._items("train", ids)), self.objective)
        self.position += self.settings.batch_size
        return {**means(result.metrics), "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}

    def begin_evaluation(self) -> int:
        """Of the held-out rows under the weights that an export would hold: their moving average where one is kept.

        Returns how many rows `evaluate_rows` has to look at, each once in every pass, before `end_evaluation`.
        """
        self._weights = ExitStack()
        self._weights.enter_context(self.engine.averaged_weights())
        self._evaluation = Evaluation(self.engine, self.objective)
        return self.evaluation_passes * len(self.tables["eval"])

    def evaluate_rows(self, done: int) -> int:
        """The next rows, about as many as an optimizer step has; `done`: rows before them, over all passes. Returns how
        many are done then."""
        rows = len(self.tables["eval"])
        number, start = divmod(done, rows)
        ids = range(start, min(start + self.part_rows, rows))
        self._evaluate(number, ids)
        return done + len(ids)

    def _evaluate(self, number: int, ids: range) -> None:
        """Rows of pass `number`."""
        self._evaluation.add(self._micro_batches(self._items("eval", ids)))

    def end_evaluation(self) -> dict[str, float]:
        """Means over the held-out rows, each weighted by what it counts (tokens, pairs, steps)."""
        metrics = self._evaluation.result()
        self._weights.close()
        return metrics

    def unmeasured(self) -> bool:
        """Whether an export of the weights as they are wants an evaluation of them first."""
        return False

    @property
    def part_rows(self) -> int:
        """Rows of a call that is no optimizer step: no more work than one, and enough for a micro-batch a rank."""
        return max(self.settings.batch_size, self.mesh.data_ranks * self.settings.trainer.micro_batch_size)

    def export(self, directory: str) -> dict[str, Any]:
        """Model and tokenizer in Hugging Face layout, written by rank 0. Returns facts for the manifest."""
        self.engine.export(directory, self._base_name())
        if self.rank == 0:
            self.tokenizer.save_pretrained(directory)
            if self.settings.lora is not None:  # with the chat template that the adapter was trained with
                self.tokenizer.save_pretrained(Path(directory) / ADAPTER_DIRECTORY)
        return tokenizer_facts(self.tokenizer)

    def _base_name(self) -> BaseName:
        """The model that training starts from, as the user knows it: the ranks' copies of it are gone afterwards."""
        model = self.settings.model
        if model is None:
            manifest = self.job.manifests["model"]
            return BaseName(f"{manifest.stage}/{manifest.key}")
        if model.hub is not None:
            return BaseName(model.hub, model.revision)
        return BaseName(model.path or "scratch")

    def _save(self, directory: Path) -> None:
        self.engine.save(directory / "model")
        if self.settings.trainer.save_hf:
            self.export(str(directory / "hf"))
        if self.rank == 0:
            (directory / "position.json").write_text(json.dumps({"position": self.position}))

    def _restore(self, directory: Path) -> None:
        self.engine.load(directory / "model")
        self.position = json.loads((directory / "position.json").read_text())["position"]

    def _first_engine(self, fresh: bool) -> TrainEngine:
        """The engine that `load` leaves behind."""
        return self._engine()

    def _engine(self) -> TrainEngine:
        settings = self.settings
        return TrainEngine(
            self._build,
            dtype=settings.dtype,
            trainer=settings.trainer,
            optimizer=settings.optimizer,
            total_steps=self.total_steps,
            frozen=settings.freeze,
            ema_decay=settings.ema_decay,
        )

    # -- from items to micro-batches -----------------------------------------------------------------------------

    def _items(self, split: str, ids: Sequence[int]) -> list[Item]:
        table = self.tables[split]
        return [table.item(number) for number in ids]

    def _micro_batches(self, items: Sequence[Item]) -> list[Batch]:
        """This rank's micro-batches of the items of an optimizer step."""
        layout = self._layout()
        plan = plan_step([item.tokens for item in items], layout)[self.mesh.data_rank]
        return [make_batch(items, micro, layout, self.tokenizer.pad_token_id) for micro in plan]

    def _layout(self) -> Layout:
        trainer = self.settings.trainer
        return Layout(
            ranks=self.mesh.data_ranks,
            micro_batch_size=trainer.micro_batch_size,
            packing=trainer.packing,
            capacity=self.samples_per_item * self.settings.max_len,
            multiple=trainer.sequence_parallel,
        )

    def _loading(self) -> dict[str, Any]:
        """How a model is read from its directory."""
        settings = self.settings
        dtype = TORCH_DTYPE[settings.dtype]
        quantised = settings.lora is not None and settings.lora.load_in_4bit
        return {
            "dtype": dtype,
            "attention": settings.trainer.attention,
            "experts": settings.trainer.experts_implementation,
            "quantization": nf4_config(dtype) if quantised else None,
        }

    # -- what the stages do differently --------------------------------------------------------------------------

    @abstractmethod
    def _build(self) -> torch.nn.Module:
        """The module to train."""

    @abstractmethod
    def _objective(self) -> Objective: ...


class PolicyTrainer(SupervisedTrainer):
    """A trainer of a causal model."""

    def _build(self) -> torch.nn.Module:
        policy = self._policy(self.model_dir)
        if self.settings.lora is not None:
            add_lora(policy.lm, self.settings.lora, "causal", self.settings.seed)
        return policy

    def export(self, directory: str) -> dict[str, Any]:
        """Generation stops at the tokens with which the responses ended that were trained on, too."""
        facts = super().export(directory)
        known = stop_token_ids(self.model_dir, self.tokenizer)
        stops = list(dict.fromkeys([*known, *self.tables["train"].end_token_ids]))
        if self.rank == 0:
            write_stop_token_ids(directory, stops)
            if self.settings.lora is not None:
                shutil.copy(Path(directory) / GENERATION, Path(directory) / ADAPTER_DIRECTORY)
        return {**facts, "stop_token_ids": stops}

    def _policy(self, directory: Path) -> Policy:
        policy = load_policy(str(directory), **self._loading())
        with gathered(list(policy.head.parameters()), self.settings.trainer.zero_stage):
            check_head(policy)
        return policy


class SftTrainer(PolicyTrainer):
    settings: SftSettings

    def _objective(self) -> Objective:
        return SftObjective()


def total_steps(settings: SupervisedSettings, rows: int) -> int:
    """Optimizer steps in all. Steps run on over the end of an epoch, so no row is dropped for a ragged batch."""
    if settings.max_steps is not None:
        return settings.max_steps
    assert settings.epochs is not None  # the settings model admits no other case
    return max(1, math.ceil(settings.epochs * rows / settings.batch_size))
