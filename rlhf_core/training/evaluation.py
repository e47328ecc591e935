"""Loss and metrics of held-out rows that come in parts, the same as of all of them at once."""

from rlhf_core.training.engine import TrainEngine, means
from rlhf_core.training.objective import Batch, Objective


class Evaluation:
    """Sums of an objective under an engine's weights, without a gradient. Every rank makes the same calls."""

    def __init__(self, engine: TrainEngine, objective: Objective):
        self._engine, self._objective = engine, objective
        self._sums: dict[str, float] = {}  # on this rank

    def add(self, micro_batches: list[Batch]) -> None:
        """Further rows. Ranks may hold different numbers of them, but must make the same number of micro-batches."""
        engine, objective = self._engine, self._objective
        for micro_batch in micro_batches:  # one at a time on the accelerator: held-out sets may be large
            batch = engine.moved(micro_batch)
            parts = objective.loss(batch, engine.infer(**objective.forward_inputs(batch)))
            for name, value in objective.denominators(batch).items():
                self._add(f"{name} denominator", value)
            for name, term in parts.terms.items():
                self._add(f"{name} numerator", term.weight * float(term.numerator))
            for name, (total, count) in parts.metrics.items():
                self._add(f"{name} sum", float(total))
                self._add(f"{name} count", float(count))

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def result(self) -> dict[str, float]:
        """The objective's loss, and the mean of each metric that counts something, over all ranks and parts.

        Raises ValueError on every rank where a term has nothing to average.
        """
        sums = self._engine.all_reduce(self._sums)
        terms = _pairs(sums, " numerator", " denominator")
        empty = [name for name, (_, denominator) in terms.items() if denominator <= 0]
        if empty:
            raise ValueError(f"the evaluation has nothing to average for {', '.join(empty)}: every row is masked")
        loss = sum(numerator / denominator for numerator, denominator in terms.values())
        return {"loss": loss, **means(_pairs(sums, " sum", " count"))}


def _pairs(sums: dict[str, float], above: str, below: str) -> dict[str, tuple[float, float]]:
    names = [key.removesuffix(above) for key in sums if key.endswith(above)]
    return {name: (sums[name + above], sums[name + below]) for name in names}
