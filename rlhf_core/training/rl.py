"""PPO's trainer, one rank of it: policy, critic, reference and reward models in one process. rl_loop.py drives them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_core.algorithms.process_reward import right_probability
from rlhf_core.config.rl import PpoSettings
from rlhf_core.data.batches import SampleOrder, chunks, model_inputs, rank_slice
from rlhf_core.models.policy import load_policy
from rlhf_core.models.process_scorer import ProcessScorer, load_process_scorer
from rlhf_core.models.scorer import Scorer, last_token_scores, load_scorer
from rlhf_core.models.tokenizer import load_tokenizer, tokenizer_facts
from rlhf_core.rollout.step_scores import judged_ids
from rlhf_core.rollout.trajectory import Trajectory
from rlhf_core.rollout.weight_transfer import BUCKET_BYTES, TransferWriter
from rlhf_core.training.engine import TORCH_DTYPE, StepResult, TrainEngine, gathered, means
from rlhf_core.training.experience import Experience, Scored, build_experience, experience_batch, kl_per_token
from rlhf_core.training.rank import Job, TrainerRank
from rlhf_core.training.rl_objectives import PolicyObjective, ValueObjective, state_values


class RlTrainer(TrainerRank):
    """Scores rollouts, trains on them, hands the policy's weights out. All collectives are the same on every rank."""

    def __init__(self, rank: int, ranks: int, job: Job):
        super().__init__(rank, ranks, job)
        self.settings: PpoSettings = job.settings

    def load(self) -> None:
        """Loads policy, critic and reference from the input artifact `policy`, or the critic from `reward`; and the
        reward model `reward` and the process reward model `process` where the job has them."""
        job, settings = self.job, self.settings
        torch.manual_seed(settings.seed + self.rank)
        policy_dir = job.input_path("policy") / "model"
        self.tokenizer = load_tokenizer(policy_dir)
        updates = (
            settings.epochs * settings.rollout.prompts * settings.rollout.samples_per_prompt // settings.batch_size
        )
        self.policy = self._engine(
            lambda: self._policy_module(policy_dir),
            settings.optimizer,
            updates * (settings.steps - settings.critic.warmup_steps),
        )
        critic_dir = job.input_path("reward") / "model" if settings.critic_init == "rm" else policy_dir
        self.critic = self._engine(
            lambda: self._critic_module(critic_dir), settings.critic.optimizer, updates * settings.steps
        )
        self.reference = self._engine(lambda: self._policy_module(policy_dir), None, 0)
        self.reward = self._frozen("reward", self._scorer_module)
        self.process = self._frozen("process", self._process_module)
        self.policy_objective = PolicyObjective(settings.algorithm, settings.rollout.temperature)
        self.value_objective = ValueObjective(settings.algorithm)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Scored]:
        """This rank's trajectories as the models see them; forward passes only."""
        scored: list[Scored] = []
        for part in chunks(trajectories, self.settings.trainer.micro_batch_size):
            inputs = model_inputs([_token_row(t) for t in part], self.tokenizer.pad_token_id)
            temperature = self.settings.rollout.temperature
            logprobs = self.policy.infer(**inputs, temperature=temperature).cpu()
            reference = self.reference.infer(**inputs, temperature=temperature).cpu()
            values = state_values(self.critic.infer(**inputs)).cpu()
            rewards = self._reward_scores(inputs)
            steps = self._step_scores(part)
            for number, t in enumerate(part):
                span = slice(len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids))
                scored.append(
                    Scored(
                        prompt_ids=t.prompt_ids,
                        response_ids=t.response_ids,
                        action_mask=t.action_mask,
                        logprobs=logprobs[number, span].numpy(),
                        ref_logprobs=reference[number, span].numpy(),
                        values=values[number, span].numpy(),
                        reward_score=rewards[number],
                        step_scores=steps[number],
                    )
                )
        return scored

    def _reward_scores(self, inputs: dict[str, torch.Tensor]) -> list[float]:
        """The reward model's raw score of each row, NaN without one."""
        if self.reward is None:
            return [math.nan] * len(inputs["input_ids"])
        return last_token_scores(self.reward.infer(**inputs).cpu(), inputs["attention_mask"]).tolist()

    def _step_scores(self, part: Sequence[Trajectory]) -> list[np.ndarray] | list[None]:
        """For each trajectory the probabilities that its steps are right, None without a process reward model."""
        if self.process is None:
            return [None] * len(part)
        judged = [judged_ids(trajectory, self.tokenizer, self.process.module.tokens) for trajectory in part]
        inputs = model_inputs([ids.tolist() for ids, _ in judged], self.tokenizer.pad_token_id)
        probabilities = right_probability(self.process.infer(**inputs)).cpu()
        return [probabilities[number, places].numpy() for number, (_, places) in enumerate(judged)]

    def train(self, step: int, rewards: Sequence[float], *shards: list[Scored]) -> dict[str, float]:
        """All passes over a rollout. `shards` are every rank's `score`, `rewards` one for each trajectory in order.

        The cut into optimizer steps is a function of (seed, step, epoch) over all trajectories, whatever the ranks.
        Returns metrics of the whole rollout; loss, gradient norm and learning rate are means over optimizer steps.
        """
        scored = [trajectory for shard in shards for trajectory in shard]
        experience = build_experience(scored, rewards, self.settings.algorithm)
        order = SampleOrder(len(scored), _order_seed(self.settings.seed, step))
        trains_policy = step > self.settings.critic.warmup_steps
        results: dict[str, list[StepResult]] = {"critic": [], "policy": []}
        for epoch in range(self.settings.epochs):
            for ids in chunks(order.ids(epoch * len(scored), len(scored)), self.settings.batch_size):
                batches = self._micro_batches(experience, ids)
                results["critic"].append(self.critic.step(batches, self.value_objective))
                if trains_policy:
                    results["policy"].append(self.policy.step(batches, self.policy_objective))
        summary = {"kl": kl_per_token(scored)}
        for role, steps in results.items():
            summary |= {f"{role}/{name}": value for name, value in over_steps(steps).items()}
        return summary

    def write_weights(self, directory: str, version: int) -> str | None:
        """The policy's weights as a transfer; the path of its index on rank 0. Every rank has to call this."""
        writer = TransferWriter(directory, version, BUCKET_BYTES) if self.rank == 0 else None
        dtype = getattr(torch, self.settings.sampler.dtype)
        for name, tensor in self.policy.full_parameters():
            if writer is not None:
                writer.add(name, tensor.to(dtype))
        return str(writer.finish().path) if writer is not None else None

    def export(self, directory: str) -> dict[str, Any]:
        """The policy and its tokenizer in Hugging Face layout, by rank 0. Returns the tokenizer's facts."""
        self.policy.export(directory)
        if self.rank == 0:
            self.tokenizer.save_pretrained(directory)
        return tokenizer_facts(self.tokenizer)

    def _save(self, directory: Path) -> None:
        self.policy.save(directory / "policy")
        self.critic.save(directory / "critic")

    def _restore(self, directory: Path) -> None:
        self.policy.load(directory / "policy")
        self.critic.load(directory / "critic")

    def _micro_batches(self, experience: Experience, ids: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        mine = rank_slice(ids, self.rank, self.ranks)
        size = self.settings.trainer.micro_batch_size
        return [experience_batch(experience, part, self.tokenizer.pad_token_id) for part in chunks(mine, size)]

    def _engine(self, build: Callable[[], torch.nn.Module], optimizer: Any, total_steps: int) -> TrainEngine:
        return TrainEngine(
            build,
            dtype=self.settings.dtype,
            trainer=self.settings.trainer,
            optimizer=optimizer,
            total_steps=total_steps,
        )

    def _frozen(self, name: str, module: Callable[[Path], torch.nn.Module]) -> TrainEngine | None:
        """An engine of the input artifact's model that is not trained; None where the job has no such input."""
        if name not in self.job.manifests:
            return None
        directory = self.job.input_path(name) / "model"
        return self._engine(lambda: module(directory), None, 0)

    def _process_module(self, directory: Path) -> ProcessScorer:
        attention = self.settings.trainer.attention
        return load_process_scorer(
            str(directory), tokens=None, dtype=TORCH_DTYPE[self.settings.dtype], attention=attention
        )

    def _policy_module(self, directory: Path) -> torch.nn.Module:
        attention = self.settings.trainer.attention
        return load_policy(str(directory), dtype=TORCH_DTYPE[self.settings.dtype], attention=attention)

    def _scorer_module(self, directory: Path) -> Scorer:
        return load_scorer(
            str(directory),
            dtype=TORCH_DTYPE[self.settings.dtype],
            attention=self.settings.trainer.attention,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def _critic_module(self, directory: Path) -> Scorer:
        """A head of zeros: values start at 0, whatever scale the reward model's scores have."""
        scorer = self._scorer_module(directory)
        with gathered([scorer.head.weight], self.settings.trainer.zero_stage, modifier_rank=0), torch.no_grad():
            scorer.head.weight.zero_()
        return scorer


def over_steps(steps: Sequence[StepResult]) -> dict[str, float]:
    """The optimizer steps of a rollout in one: metrics by what they counted, the rest as means over the steps."""
    if not steps:
        return {}
    each = {name: float(np.mean([getattr(step, name) for step in steps])) for name in ("loss", "grad_norm", "lr")}
    return {**each, **means(*(step.metrics for step in steps))}


def _token_row(trajectory: Trajectory) -> list[int]:
    return np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).tolist()


def _order_seed(seed: int, step: int) -> int:
    """A seed for each step: SampleOrder then derives one for each epoch."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
