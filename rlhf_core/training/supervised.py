"""SFT and reward-model training: one rank of it. supervised_loop.py drives a group of them."""

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.supervised import SftSettings, SupervisedSettings
from rlhf_core.data.batches import Exchange, SampleOrder, TokenError, chunks, rank_slice, render_exchange
from rlhf_core.data.rows import Row, read_jsonl
from rlhf_core.models.policy import load_policy
from rlhf_core.models.scorer import initialise_head, load_scorer
from rlhf_core.models.tokenizer import load_tokenizer, tokenizer_facts
from rlhf_core.training.engine import TORCH_DTYPE, TrainEngine, gathered, means
from rlhf_core.training.objective import Batch, Objective
from rlhf_core.training.rank import Job, TrainerRank, base_model_directory
from rlhf_core.training.supervised_objectives import PairwiseObjective, SftObjective, pair_batch, sft_batch


class SupervisedTrainer(TrainerRank):
    """One rank. The data's position is stored, not derived from steps."""

    objective: Objective

    def load(self) -> dict[str, Any]:
        """Loads data and model. Returns steps in all, rows by what became of them."""
        job = self.job
        settings: SupervisedSettings = job.settings
        torch.manual_seed(settings.seed + self.rank)
        self.model_dir = self._model_directory()
        self.tokenizer = load_tokenizer(self.model_dir)
        data = job.input_path("data")
        train, counts = self._encode_all(read_jsonl(data / "rows.jsonl"), "rows.jsonl")
        held_out_file = data / "eval.jsonl"
        held_out = read_jsonl(held_out_file) if held_out_file.exists() else []
        self.rows = train
        self.eval_rows, dropped = [], 0
        if held_out:
            self.eval_rows, eval_counts = self._encode_all(held_out, "eval.jsonl")
            dropped = eval_counts["dropped_too_long"]
        self.order = SampleOrder(len(train), settings.seed)
        self.position = 0
        self.total_steps = total_steps(settings, len(train))
        self.engine = TrainEngine(
            self._build,
            dtype=settings.dtype,
            trainer=settings.trainer,
            optimizer=settings.optimizer,
            total_steps=self.total_steps,
        )
        evaluated = {"eval_rows": len(self.eval_rows), "eval_dropped_too_long": dropped}
        return {"total_steps": self.total_steps, **evaluated, **counts}

    def train_step(self) -> dict[str, float]:
        """The next optimizer step."""
        settings: SupervisedSettings = self.job.settings
        ids = self.order.ids(self.position, settings.batch_size)
        mine = [self.rows[i] for i in rank_slice(ids, self.rank, self.ranks)]
        parts = chunks(mine, settings.trainer.micro_batch_size)
        result = self.engine.step([self._batch(part, [True] * len(part)) for part in parts], self.objective)
        self.position += settings.batch_size
        return {**means(result.metrics), "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}

    def evaluate(self) -> dict[str, float]:
        """Means over the held-out rows. The last rows are dealt out with fill that has no weight."""
        share = math.ceil(len(self.eval_rows) / self.ranks)
        mine = list(range(self.rank * share, (self.rank + 1) * share))
        real = [i < len(self.eval_rows) for i in mine]
        rows = [self.eval_rows[i] if i < len(self.eval_rows) else self.eval_rows[0] for i in mine]
        size = self.job.settings.trainer.micro_batch_size
        batches = [self._batch(p, r) for p, r in zip(chunks(rows, size), chunks(real, size), strict=True)]
        return self.engine.evaluate(batches, self.objective)

    def export(self, directory: str) -> dict[str, Any]:
        """Model and tokenizer in Hugging Face layout, written by rank 0. Returns the tokenizer's facts."""
        self.engine.export(directory)
        if self.rank == 0:
            self.tokenizer.save_pretrained(directory)
        return tokenizer_facts(self.tokenizer)

    def _save(self, directory: Path) -> None:
        self.engine.save(directory / "model")
        if self.rank == 0:
            (directory / "position.json").write_text(json.dumps({"position": self.position}))

    def _restore(self, directory: Path) -> None:
        self.engine.load(directory / "model")
        self.position = json.loads((directory / "position.json").read_text())["position"]

    def _encode_all(self, rows: list[Row], file: str) -> tuple[list[Any], dict[str, int]]:
        kept, too_long = [], 0
        for number, row in enumerate(rows, start=1):
            try:
                encoded = self._encode(row)
            except TokenError as error:
                raise TokenError(f"row {number} of {file}: {error}") from None
            if max(map(len, self._token_rows(encoded))) > self.job.settings.max_len:
                too_long += 1
            else:
                kept.append(encoded)
        if not kept:
            raise TokenError(f"{file}: all {len(rows)} rows are longer than max_len {self.job.settings.max_len} tokens")
        return kept, {"rows": len(rows), "kept": len(kept), "dropped_too_long": too_long}

    # What SFT and RM do differently.

    @abstractmethod
    def _model_directory(self) -> Path:
        """Hugging Face directory that the weights start from."""

    @abstractmethod
    def _build(self) -> torch.nn.Module:
        """The module to train."""

    @abstractmethod
    def _encode(self, row: Row) -> Any:
        """A row as token ids."""

    @abstractmethod
    def _token_rows(self, encoded: Any) -> Sequence[Sequence[int]]:
        """The sequences that an encoded row puts through the model."""

    @abstractmethod
    def _batch(self, rows: Sequence[Any], real: Sequence[bool]) -> Batch:
        """Encoded rows as a micro-batch; those that are not real count nowhere."""


class SftTrainer(SupervisedTrainer):
    objective = SftObjective()

    def __init__(self, rank: int, ranks: int, job: Job):
        super().__init__(rank, ranks, job)
        settings: SftSettings = job.settings
        self._base = base_model_directory(settings.model, job.scratch, rank)

    def _model_directory(self) -> Path:
        return self._base

    def _build(self) -> torch.nn.Module:
        settings = self.job.settings
        return load_policy(str(self.model_dir), dtype=TORCH_DTYPE[settings.dtype], attention=settings.trainer.attention)

    def _encode(self, row: Row) -> Exchange:
        return render_exchange(self.tokenizer, row["prompt"], row["response"])

    def _token_rows(self, encoded: Exchange) -> Sequence[Sequence[int]]:
        return [encoded.ids]

    def _batch(self, rows: Sequence[Exchange], real: Sequence[bool]) -> Batch:
        batch = sft_batch(rows, self.tokenizer.pad_token_id)
        batch["loss_mask"] &= torch.tensor(real).unsqueeze(1)
        return batch


class RmTrainer(SupervisedTrainer):
    objective = PairwiseObjective()

    def _model_directory(self) -> Path:
        return self.job.input_path("model") / "model"

    def _build(self) -> torch.nn.Module:
        settings = self.job.settings
        scorer = load_scorer(
            str(self.model_dir),
            dtype=TORCH_DTYPE[settings.dtype],
            attention=settings.trainer.attention,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        with gathered([scorer.head.weight], settings.trainer.zero_stage, modifier_rank=0):
            initialise_head(scorer, settings.seed)
        return scorer

    def _encode(self, row: Row) -> tuple[Exchange, Exchange]:
        return (
            render_exchange(self.tokenizer, row["prompt"], row["chosen"]),
            render_exchange(self.tokenizer, row["prompt"], row["rejected"]),
        )

    def _token_rows(self, encoded: tuple[Exchange, Exchange]) -> Sequence[Sequence[int]]:
        return [encoded[0].ids, encoded[1].ids]

    def _batch(self, rows: Sequence[tuple[Exchange, Exchange]], real: Sequence[bool]) -> Batch:
        batch = pair_batch(rows, self.tokenizer.pad_token_id)
        batch["weight"] = torch.tensor(real, dtype=torch.float32)
        return batch


def total_steps(settings: SupervisedSettings, rows: int) -> int:
    """Optimizer steps in all. Steps run on over the end of an epoch, so no row is dropped for a ragged batch."""
    if settings.max_steps is not None:
        return settings.max_steps
    assert settings.epochs is not None  # the settings model admits no other case
    return max(1, math.ceil(settings.epochs * rows / settings.batch_size))
