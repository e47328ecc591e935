"""RL's loop: sample, reward, score, train, send the weights. The driver of one trainer group and one sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.cluster.limit import Limit
from rlhf_core.config.rl import PpoSettings
from rlhf_core.rollout.dump import RolloutDump
from rlhf_core.rollout.evaluation import Evaluator
from rlhf_core.rollout.generation import generate
from rlhf_core.rollout.sample import Sample, SampleRequest
from rlhf_core.rollout.weight_transfer import transfer_directory
from rlhf_core.store.checkpoints import best_complete, newest_complete
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store
from rlhf_core.tracking.history import History
from rlhf_core.training.progress import finish_checkpoint, restore, resume_point
from rlhf_core.training.rank import Job
from rlhf_core.training.rewarded import Rewarded
from rlhf_core.training.rl_metrics import Clock, rollout_metrics
from rlhf_core.training.rl_ranks import RlRanks
from rlhf_core.training.rl_rollout import Rollouts


@dataclass
class PpoRun:
    """One run in exact mode: a step is a function of the weights before it, the seed, its number and the prompts drawn.

    What moves whole checkpoints (restoring, saving) may take start_timeout_s; a step's parts, step_timeout_s each.
    dump: where rollouts are kept; None: they are not.
    """

    job: Job
    ranks: RlRanks
    rollouts: Rollouts
    evaluator: Evaluator
    history: History
    store: Store
    lease: Lease
    start_timeout_s: float
    dump: RolloutDump | None = None

    @property
    def settings(self) -> PpoSettings:
        return self.job.settings

    def run(self) -> dict[str, Any]:
        """All steps, from the newest complete training checkpoint. Returns what was measured first and last.

        With `best_metric` the ranks end with the weights of the best evaluation.
        """
        settings, events = self.settings, self.history.events
        start = self._resume()
        self._send_weights(start)
        if start == 0:
            self._evaluate(0)
        events.phase("training")
        for step in range(start + 1, settings.steps + 1):
            self.history.add(step, self._step(step))
            metric = None
            if step == settings.steps or (settings.eval_steps and step % settings.eval_steps == 0):
                metric = self._evaluate(step)
            events.progress(step, settings.steps, "training")
            if settings.trainer.saves_at(step, settings.steps) or self._improved(step):
                self._checkpoint(step, metric)
        return {**self._measured(), "exported_step": self._restore_best()}

    # -- training checkpoints --------------------------------------------------------------------------------------

    def _resume(self) -> int:
        group = self.ranks.group
        start = resume_point(group, self.job, self.store, self.history, timeout_s=self.start_timeout_s)
        if start:
            checkpoint, _ = newest_complete(self.store, self.job.stage, self.job.key)
            assert checkpoint is not None  # only the lease's holder removes one
            self.rollouts.drawn = checkpoint.extra["prompts_drawn"]
        return start

    def _checkpoint(self, step: int, metric: float | None) -> None:
        finish_checkpoint(
            self.ranks.group,
            self.job,
            self.store,
            self.lease,
            self.history,
            step,
            self.settings.trainer,
            timeout_s=self.start_timeout_s,
            extra={"prompts_drawn": self.rollouts.drawn},
            metric=metric,
            better="higher",
        )

    def _improved(self, step: int) -> bool:
        """Whether the evaluation at `step`, if there was one, is better than each before it but the first, of step 0:
        the weights that training started from are no result of this stage."""
        if self.settings.best_metric is None:
            return False
        steps, values = self.history.curve(self.settings.best_metric, "eval")
        trained = [value for at, value in zip(steps, values, strict=True) if at]
        return bool(trained) and steps[-1] == step and all(trained[-1] > before for before in trained[:-1])

    def _restore_best(self) -> int:
        """The step whose weights the ranks now hold: that of the best evaluation, or the last."""
        last = self.settings.steps
        if self.settings.best_metric is None:
            return last
        best = best_complete(self.store, self.job.stage, self.job.key, "higher")
        if best is None or best.step == last:
            return last
        self.history.events.write("phase", name="best", step=best.step)
        restore(self.ranks.group, self.job, self.store, best, timeout_s=self.start_timeout_s)
        return best.step

    # -- a step ----------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, float]:
        """One rollout and the passes over it; leaves the sampler with the new weights."""
        clock = Clock()
        rollout, about = self.rollouts.draw(step, clock)
        if self.dump is not None:
            self.lease.check()
            self.dump.write(step, [one.trajectory for one in rollout], about)
        metrics = {**rollout_metrics(rollout, version=step - 1), **about, **self.ranks.train(step, rollout, clock)}
        self._send_weights(step)
        clock.lap("transfer")
        self._show_sample(step, rollout[0])
        return {**metrics, **clock.metrics()}

    def _send_weights(self, version: int, averaged: bool = False) -> None:
        """The policy's weights, or their moving average, into the sampler."""
        limit = Limit(self.settings.trainer.step_timeout_s, "ppo.trainer.step_timeout_s")
        with transfer_directory(self.job.scratch) as directory:
            index = self.ranks.call("write_weights", str(directory), version, averaged)[0]
            self.rollouts.sampler.call("update_weights", index, timeout_s=limit)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> float | None:
        """What held-out prompts are answered, into the history. Returns `best_metric`.

        Sampled from what is exported: the moving average where there is one.
        """
        if self.settings.ema_decay is not None:
            self._send_weights(step, averaged=True)
        clock = Clock()
        evaluation = self.evaluator.run(self._generate, self.rollouts.stop_token_ids)
        clock.lap("evaluation")
        self.history.add(step, {**evaluation.metrics, "seconds/evaluation": clock.laps["evaluation"]}, phase="eval")
        self.history.add_generations(step, self.evaluator.shown(evaluation))
        if self.settings.ema_decay is not None:
            self._send_weights(step)
        return evaluation.metrics[self.settings.best_metric] if self.settings.best_metric is not None else None

    def _generate(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        limit = Limit(self.settings.generate_timeout_s, "ppo.generate_timeout_s")
        return generate(self.rollouts.sampler, requests, self.settings.sampler, limit)

    # -- what is shown ---------------------------------------------------------------------------------------------

    def _show_sample(self, step: int, shown: Rewarded) -> None:
        assert shown.prompt is not None  # a sampled one has its prompt
        self.history.add_sample(
            step,
            prompt=shown.prompt.text,
            response=shown.text,
            label=shown.prompt.label,
            reward=shown.graded.reward,
            step_scores=list(shown.graded.step_scores) if "prm" in shown.values else None,
        )

    def _measured(self) -> dict[str, Any]:
        measured: dict[str, Any] = {"steps": self.settings.steps}
        names = [(f"reward/{name}", "train") for name in self.settings.reward.weights]
        evaluations = [record for record in self.history.records if record["phase"] == "eval"]
        known = self.settings.evaluation.metrics
        scores = [n for n in dict.fromkeys(n for one in evaluations for n in one) if n.partition("/")[0] in known]
        for name, phase in [("reward", "train"), *names, *((n, "eval") for n in scores)]:
            values = self.history.curve(name, phase)[1]
            if values:
                measured[f"{name}/first"], measured[f"{name}/last"] = values[0], values[-1]
        for name in ("parity/max", "parity/mean"):
            measured[name] = max(self.history.curve(name)[1])
        return measured
