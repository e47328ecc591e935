"""DPO and KTO, one rank: log-probs of the reference are computed once, with no second model beside the trained one.

They come before the first step, some rows a call, and are kept in every training checkpoint, so that a resumed run
compares with the same reference.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhf_core.config.supervised import DpoSettings, KtoSettings
from rlhf_core.data.layout import make_batch, plan_step
from rlhf_core.data.samples import Item, Sample
from rlhf_core.training.batch_views import model_inputs, sample_logprobs
from rlhf_core.training.engine import TrainEngine
from rlhf_core.training.evaluation import Evaluation
from rlhf_core.training.objective import Batch, Objective
from rlhf_core.training.objectives_preference import DpoObjective, KtoKlObjective, KtoObjective
from rlhf_core.training.rank import Job, base_model_directory
from rlhf_core.training.supervised import PolicyTrainer

REFERENCE = "reference.npz"


class ReferenceTrainer(PolicyTrainer):
    """A trainer whose items carry what the reference says of them: `reference[name]` (rows,) float32 a scalar."""

    settings: DpoSettings | KtoSettings

    def __init__(self, rank: int, ranks: int, job: Job):
        super().__init__(rank, ranks, job)
        source = self.settings.reference
        self._reference_base = base_model_directory(source, job.scratch, rank) if source is not None else None
        self.reference: dict[str, dict[str, np.ndarray]] = {}

    def load(self, fresh: bool) -> dict[str, Any]:
        """With `fresh`, `refer` has to be called for all rows, and then `end_reference`, before anything else."""
        about = super().load(fresh)
        return {**about, "reference_rows": sum(map(len, self.tables.values())) if fresh else 0}

    def refer(self, done: int) -> int:
        """The reference's scalars of the next rows, about as many as an optimizer step has; `done`: rows before them,
        over all splits. Returns how many are done then."""
        split, ids = self._next_rows(done)
        for name, values in self._reference_scalars(split, ids).items():
            whole = self.reference.setdefault(split, {}).setdefault(name, self._unknown(split))
            whole[ids.start : ids.stop] = values
        return done + len(ids)

    def end_reference(self) -> None:
        """A reference of its own goes, and the model to train is loaded."""
        if self._reference_base is not None:
            self.engine.close()
            del self.engine
            self.engine = self._engine()

    def _first_engine(self, fresh: bool) -> TrainEngine:
        """The reference's, until `end_reference`: that of a model of its own, or the one that training starts from."""
        if fresh and self._reference_base is not None:
            return self._frozen(self._reference_base)
        return self._engine()

    def _next_rows(self, done: int) -> tuple[str, range]:
        """The split in which row number `done` over all splits is, and rows of it from there on."""
        start = done
        for split, table in self.tables.items():
            if start < len(table):
                return split, range(start, min(start + self.part_rows, len(table)))
            start -= len(table)
        raise ValueError(f"row {done} is after the last one")

    def _unknown(self, split: str) -> np.ndarray:
        return np.full(len(self.tables[split]), np.nan, np.float32)

    def _frozen(self, directory: Path) -> TrainEngine:
        settings = self.settings
        return TrainEngine(
            lambda: self._policy(directory), dtype=settings.dtype, trainer=settings.trainer, optimizer=None
        )

    @abstractmethod
    def _reference_scalars(self, split: str, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Scalar name -> (ids,) float32, under the engine's weights."""

    def _logprob_sums(self, items: Sequence[Item]) -> np.ndarray:
        """(items, samples of each) float32: summed log-probs of the targets under the engine's weights.

        Every rank computes its share, and all get the whole.
        """
        engine, layout, size = self.engine, self._layout(), len(items[0].samples)
        sums = torch.zeros(len(items), size, dtype=torch.float64, device=engine.device)
        for micro in plan_step([item.tokens for item in items], layout)[self.mesh.data_rank]:
            batch = make_batch(items, micro, layout, self.tokenizer.pad_token_id)
            logprobs = engine.infer(**model_inputs(batch)).cpu()
            if micro:
                numbers = [number for row in micro for number in row]
                sums[numbers] = sample_logprobs(batch, logprobs, size).to(sums.device)
        dist.all_reduce(sums)
        return (sums / self.mesh.peers).float().cpu().numpy()

    def _plain_items(self, split: str, ids: Sequence[int]) -> list[Item]:
        """The items as they are in the table, without the reference's scalars."""
        return super()._items(split, ids)

    def _items(self, split: str, ids: Sequence[int]) -> list[Item]:
        scalars = self.reference[split]
        return [
            Item(item.samples, {**item.scalars, **{name: float(values[n]) for name, values in scalars.items()}})
            for n, item in zip(ids, self._plain_items(split, ids), strict=True)
        ]

    def _save(self, directory: Path) -> None:
        super()._save(directory)
        if self.rank == 0:
            named = {f"{split}/{name}": a for split, scalars in self.reference.items() for name, a in scalars.items()}
            np.savez(directory / REFERENCE, allow_pickle=False, **named)

    def _restore(self, directory: Path) -> None:
        super()._restore(directory)
        self.reference = {}
        with np.load(directory / REFERENCE, allow_pickle=False) as file:
            for key in file.files:
                split, name = key.split("/")
                self.reference.setdefault(split, {})[name] = file[key]


class DpoTrainer(ReferenceTrainer):
    settings: DpoSettings
    samples_per_item = 2

    def _objective(self) -> Objective:
        return DpoObjective(self.settings)

    def _reference_scalars(self, split: str, ids: Sequence[int]) -> dict[str, np.ndarray]:
        sums = self._logprob_sums(self._plain_items(split, ids))
        return {"reference_chosen": sums[:, 0], "reference_rejected": sums[:, 1]}


class KtoTrainer(ReferenceTrainer):
    """The KL that KTO compares with is estimated on each row's prompt with another row's response.

    It is the mean over the whole optimizer step, found in a pass without gradient before it, so the loss does not
    depend on how the step was cut (Ethayarajh et al. 2024, section 4.1, take it over a micro-batch).
    """

    settings: KtoSettings
    evaluation_passes = 2  # the first for the KL

    def train_step(self) -> dict[str, float]:
        estimate = self._kl_evaluation()
        estimate.add(self._mismatched_batches("train", self.order.ids(self.position, self.settings.batch_size)))
        self._kl = estimate.result()["kl"]
        return super().train_step()

    def begin_evaluation(self) -> int:
        self._kl_estimate = self._kl_evaluation()
        return super().begin_evaluation()

    def _evaluate(self, number: int, ids: range) -> None:
        if number == 0:
            self._kl_estimate.add(self._mismatched_batches("eval", ids))
            return
        if ids.start == 0:
            self._kl = self._kl_estimate.result()["kl"]
        super()._evaluate(number, ids)

    def _objective(self) -> Objective:
        return KtoObjective(self.settings, samples_per_item=1)

    def _micro_batches(self, items: Sequence[Item]) -> list[Batch]:
        return [{**batch, "kl": torch.tensor(self._kl)} for batch in super()._micro_batches(items)]

    def _kl_evaluation(self) -> Evaluation:
        return Evaluation(self.engine, KtoKlObjective(samples_per_item=1))

    def _mismatched_batches(self, split: str, ids: Sequence[int]) -> list[Batch]:
        scalars = self.reference[split]["reference_mismatched"]
        items = [
            Item(item.samples, {"reference_mismatched": float(scalars[n])})
            for n, item in zip(ids, self._mismatched(split, ids), strict=True)
        ]
        return super()._micro_batches(items)

    def _reference_scalars(self, split: str, ids: Sequence[int]) -> dict[str, np.ndarray]:
        own = self._logprob_sums(self._plain_items(split, ids))
        mismatched = self._logprob_sums(self._mismatched(split, ids))
        return {"reference": own[:, 0], "reference_mismatched": mismatched[:, 0]}

    def _mismatched(self, split: str, ids: Sequence[int]) -> list[Item]:
        table = self.tables[split]
        partners = partner_rows(len(table), self.settings.seed)
        return [mismatched(table.item(n), table.item(int(partners[n])), self.settings.max_len) for n in ids]


@lru_cache(maxsize=2)  # of the training rows and the held-out ones: every step asks
def partner_rows(rows: int, seed: int) -> np.ndarray:
    """(rows,), read-only: for each row another one, each once: the next on a random cycle through all of them."""
    cycle = np.random.default_rng([seed, rows]).permutation(rows)
    partners = np.empty(rows, dtype=np.int64)
    partners[cycle] = np.roll(cycle, -1)
    partners.flags.writeable = False
    return partners


def mismatched(row: Item, other: Item, max_len: int) -> Item:
    """The context of one row's response with the response of another, cut off at max_len tokens."""
    (ours,), (theirs,) = row.samples, other.samples
    head, tail = _response_start(ours), _response_start(theirs)
    ids = np.concatenate([ours.ids[:head], theirs.ids[tail:]])[:max_len]
    weights = np.concatenate([ours.weights[:head], theirs.weights[tail:]])[:max_len]
    return Item((Sample(ids, weights),))


def _response_start(sample: Sample) -> int:
    return int(np.argmax(sample.weights > 0))
