"""RL's trainer, one rank of it: policy, critic, reference and reward models in one process. rl_loop.py drives them."""

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.algorithms.kl import adapted_coefficient
from rlhf_core.algorithms.process_reward import right_probability
from rlhf_core.algorithms.segments import last_in_segment
from rlhf_core.config.rl import PpoSettings
from rlhf_core.data.batches import SampleOrder
from rlhf_core.data.layout import MicroBatch, make_batch
from rlhf_core.data.samples import Item, Sample
from rlhf_core.data.token_cache import TokenTable
from rlhf_core.models.export import ADAPTER_DIRECTORY, BaseName
from rlhf_core.models.lora import adapters_off
from rlhf_core.models.tokenizer import GENERATION, load_tokenizer, stop_token_ids, tokenizer_facts, write_stop_token_ids
from rlhf_core.rollout.step_scores import judged_ids
from rlhf_core.rollout.trajectory import Trajectory
from rlhf_core.rollout.weight_transfer import BUCKET_BYTES, TransferWriter
from rlhf_core.training.batch_views import model_inputs
from rlhf_core.training.engine import StepResult, TrainEngine, gathered, means
from rlhf_core.training.experience import Graded, Judgement, Scored, build_experience, trajectory_kl
from rlhf_core.training.mesh import mesh_of
from rlhf_core.training.objective import Batch, Objective
from rlhf_core.training.objectives_aux import AuxLossObjective
from rlhf_core.training.parameters import bare_name
from rlhf_core.training.rank import Job, TrainerRank
from rlhf_core.training.rl_batches import (
    by_item,
    experience_batches,
    optimizer_steps,
    ptx_batches,
    ptx_layout,
    rollout_layout,
    trajectory_item,
)
from rlhf_core.training.rl_models import RlModels
from rlhf_core.training.rl_objectives import PolicyObjective, PtxObjective, ValueObjective
from rlhf_core.training.rl_state import RlState

_REFERENCE = "reference.safetensors"


class RlTrainer(TrainerRank):
    """Scores rollouts, trains on them, hands the policy's weights out. All collectives are the same on every rank."""

    def __init__(self, rank: int, ranks: int, job: Job):
        super().__init__(rank, ranks, job)
        self.settings: PpoSettings = job.settings
        self.mesh = mesh_of(self.settings.trainer, rank)
        self.layout = rollout_layout(self.settings)

    def load(self) -> None:
        """Loads what the settings need of: policy, and reference, from the input artifact `policy`; the critic from it
        or from `reward`; the reward model `reward` and the process reward model `process`."""
        job, settings = self.job, self.settings
        # Peers that share samples draw the same numbers.
        torch.manual_seed(settings.seed + self.mesh.data_rank)
        policy_dir = job.input_path("policy") / "model"
        self.tokenizer = load_tokenizer(policy_dir)
        models = RlModels(settings, self.tokenizer.pad_token_id)
        self.policy = models.policy(policy_dir)
        self.critic: TrainEngine | None = None
        if settings.critic is not None:
            critic_dir = job.input_path("reward") / "model" if settings.critic_init == "rm" else policy_dir
            self.critic = models.critic(critic_dir)
        # With adapters the policy's own frozen weights are the reference.
        self.reference: TrainEngine | None = None
        if settings.algorithm.kl.coef and settings.lora is None:
            self.reference = models.reference(policy_dir)
        self.reward = self._frozen("reward", models.reward)
        self.process = self._frozen("process", models.process)
        self.state = RlState(settings.algorithm.kl.coef)
        self.value_objective = self._with_aux(
            ValueObjective(settings.algorithm), settings.critic.aux_loss_coef if settings.critic is not None else 0.0
        )
        self.ptx_rows: TokenTable | None = None
        if settings.ptx is not None:
            self.ptx_rows = job.token_tables()["ptx"]
            self.ptx_order = SampleOrder(len(self.ptx_rows), settings.seed)

    # -- forward passes --------------------------------------------------------------------------------------------

    def judge(self, trajectories: Sequence[Trajectory], micro_batches: Sequence[MicroBatch]) -> list[Judgement]:
        """What the models of rewards say of this rank's trajectories. micro_batches: as in rl_batches.Share."""
        items = [_item(t) for t in trajectories]
        found: dict[int, Judgement] = {}
        for micro in micro_batches:
            batch, numbers = self._batch(items, micro), _numbers(micro)
            scores = self._reward_scores(batch)
            steps = self._step_scores([trajectories[number] for number in numbers or [0]], micro)
            for number, score, (probabilities, ends) in zip(numbers, scores, steps, strict=False):
                found[number] = Judgement(score, probabilities, ends)
        return [found[number] for number in sorted(found)]

    def score(self, trajectories: Sequence[Trajectory], micro_batches: Sequence[MicroBatch]) -> list[Scored]:
        """This rank's trajectories as policy, reference and critic see them."""
        items = [_item(t) for t in trajectories]
        temperature = self.settings.rollout.temperature
        found: dict[int, Scored] = {}
        for micro in micro_batches:
            batch = self._batch(items, micro)
            inputs = model_inputs(batch)
            logprobs, entropy = self.policy.infer(**inputs, temperature=temperature, entropy=True).cpu()
            reference = values = None
            if self.settings.algorithm.kl.coef:
                reference = by_item(self._reference_logprobs(**inputs, temperature=temperature), batch)
            if self.critic is not None:
                values = by_item(self.critic.infer(**inputs).cpu(), batch)
            both = zip(by_item(logprobs, batch), by_item(entropy, batch), strict=True)
            for at, (number, (own, entropies)) in enumerate(zip(_numbers(micro), both, strict=False)):
                t = trajectories[number]
                start = len(t.prompt_ids)
                found[number] = Scored(
                    prompt_ids=t.prompt_ids,
                    response_ids=t.response_ids,
                    action_mask=t.action_mask,
                    sampler_logprobs=t.sampler_logprobs,
                    logprobs=own[start:].numpy(),
                    entropy=entropies[start:].numpy(),
                    ref_logprobs=None if reference is None else reference[at][start:].numpy(),
                    # The value of the state in which a token is chosen is the score at the token before it.
                    values=None if values is None else values[at][start - 1 : -1].numpy(),
                    final_value=0.0 if values is None else float(values[at][-1]),
                )
        return [found[number] for number in sorted(found)]

    def _reference_logprobs(self, **inputs: Any) -> Tensor:
        """(R, L), of a model of its own or of the policy without its adapters."""
        if self.reference is not None:
            return self.reference.infer(**inputs).cpu()
        with adapters_off(self.policy.module.lm):
            return self.policy.infer(**inputs).cpu()

    def _batch(self, items: Sequence[Item], micro: MicroBatch) -> Batch:
        return make_batch(items, micro, self.layout, self.tokenizer.pad_token_id)

    def _reward_scores(self, batch: Batch) -> list[float]:
        """The reward model's raw score of each item, NaN without one."""
        samples = len(batch["real"])
        if self.reward is None:
            return [math.nan] * samples
        scores = self.reward.infer(**model_inputs(batch)).cpu()
        return last_in_segment(scores, batch["segments"], samples).tolist()

    def _step_scores(
        self, part: Sequence[Trajectory], micro: MicroBatch
    ) -> list[tuple[np.ndarray | None, tuple[int, ...]]]:
        """For each trajectory of a micro-batch the probabilities that its steps are right, and the steps' ends."""
        if self.process is None:
            return [(None, ())] * len(part)
        judged = [judged_ids(trajectory, self.tokenizer, self.process.module.tokens) for trajectory in part]
        items = [Item((Sample(ids.astype(np.int32), np.zeros(len(ids), np.float32)),)) for ids, _ in judged]
        numbers = iter(range(len(items)))
        batch = self._batch(items, [[next(numbers) for _ in row] for row in micro])
        probabilities = by_item(right_probability(self.process.infer(**model_inputs(batch))).cpu(), batch)
        return [
            # Before the k-th placeholder, counted from 0, stand the prompt and k placeholders.
            (own[places].numpy(), tuple(at - k - 1 - len(t.prompt_ids) for k, at in enumerate(places)))
            for own, (_, places), t in zip(probabilities, judged, part, strict=True)
        ]

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self, step: int, graded: Sequence[Graded], numbers: Sequence[Sequence[int]], *shards: list[Scored]
    ) -> dict[str, float]:
        """All passes over a rollout. `shards` are every rank's `score`, `numbers` those of its trajectories in the
        rollout, `graded` one for each trajectory in order.

        The cut into optimizer steps is a function of (seed, step, epoch) over all trajectories, whatever the ranks; the
        last may be smaller. Returns metrics of the whole rollout; loss, gradient norm and learning rate are means over
        optimizer steps.
        """
        settings, algorithm = self.settings, self.settings.algorithm
        scored = _in_order(numbers, shards)
        self.state = replace(self.state, rewards=self.state.rewards.updated([one.reward for one in graded]))
        new_tokens = settings.rollout.max_new_tokens
        experience = build_experience(scored, graded, algorithm, self.state, new_tokens)
        policy_objective = self._policy_objective()
        results: dict[str, list[StepResult]] = {"critic": [], "policy": []}
        pad, seed = self.tokenizer.pad_token_id, _order_seed(settings.seed, step)
        for ids in optimizer_steps(len(scored), settings.batch_size, settings.epochs, seed):
            batches = experience_batches(experience, ids, self.layout, self.mesh.data_rank, pad)
            if self.critic is not None:
                results["critic"].append(self.critic.step(batches, self.value_objective))
            if step > settings.warmup_steps:
                results["policy"].append(self.policy.step([*batches, *self._next_ptx()], policy_objective))
        summary = {**experience.metrics, "kl/coef": self.state.kl_coef}
        for role, steps in results.items():
            summary |= {f"{role}/{name}": value for name, value in over_steps(steps).items()}
        self._after(step, scored)
        return summary

    def _policy_objective(self) -> Objective:
        """With the KL coefficient as it is now."""
        settings = self.settings
        rollout = settings.rollout
        objective: Objective = PolicyObjective(
            settings.algorithm, rollout.temperature, self.state.kl_coef, rollout.max_new_tokens
        )
        if settings.ptx is not None:
            objective = PtxObjective(objective, settings.ptx.coef)
        return self._with_aux(objective, settings.aux_loss_coef)

    def _with_aux(self, objective: Objective, coef: float) -> Objective:
        return AuxLossObjective(objective, coef) if coef else objective

    def _next_ptx(self) -> list[Batch]:
        """This rank's micro-batches of the next rows of PPO-ptx; none without it."""
        settings, table = self.settings, self.ptx_rows
        if settings.ptx is None or table is None:
            return []
        position, count = self.state.ptx_position, settings.ptx_rows
        items = [table.item(number) for number in self.ptx_order.ids(position, count)]
        self.state = replace(self.state, ptx_position=position + count)
        layout = ptx_layout(settings, settings.ptx.max_len)
        return ptx_batches(items, layout, self.mesh.data_rank, self.tokenizer.pad_token_id)

    def _after(self, step: int, scored: Sequence[Scored]) -> None:
        """Moves the KL coefficient and the reference, where that is set."""
        kl = self.settings.algorithm.kl
        # While the critic warms up the policy stands still, and a KL of 0 says nothing about the coefficient.
        if kl.target is not None and step > self.settings.warmup_steps:
            coef = adapted_coefficient(
                self.state.kl_coef, trajectory_kl(scored), target=kl.target, horizon=kl.horizon, samples=len(scored)
            )
            self.state = replace(self.state, kl_coef=coef)
        if self.reference is not None and kl.refresh_steps is not None and step % kl.refresh_steps == 0:
            _copy_into(self.reference, self.policy.full_parameters())
            self.state = replace(self.state, reference_step=step)

    def write_weights(self, directory: str, version: int, averaged: bool) -> str | None:
        """The policy's weights, or their moving average where there is one, as a transfer; the path of its index on
        rank 0. Every rank has to call this."""
        writer = TransferWriter(directory, version, BUCKET_BYTES) if self.rank == 0 else None
        dtype = getattr(torch, self.settings.sampler.dtype)
        for name, tensor in self.policy.full_parameters(averaged=averaged):
            if writer is not None:
                writer.add(name, tensor.to(dtype))
        return str(writer.finish().path) if writer is not None else None

    def export(self, directory: str) -> dict[str, Any]:
        """The policy, merged, and its tokenizer in Hugging Face layout, by rank 0; its adapter below. Returns the
        tokenizer's facts."""
        manifest = self.job.manifests["policy"]
        self.policy.export(directory, BaseName(f"{manifest.stage}/{manifest.key}"))
        stops = stop_token_ids(self.job.input_path("policy") / "model", self.tokenizer)
        if self.rank == 0:
            self.tokenizer.save_pretrained(directory)
            write_stop_token_ids(directory, stops)
            if self.settings.lora is not None:
                adapter = Path(directory) / ADAPTER_DIRECTORY
                self.tokenizer.save_pretrained(adapter)
                shutil.copy(Path(directory) / GENERATION, adapter)
        return {**tokenizer_facts(self.tokenizer), "stop_token_ids": list(stops)}

    def _save(self, directory: Path) -> None:
        self.policy.save(directory / "policy")
        if self.critic is not None:
            self.critic.save(directory / "critic")
        if self.reference is not None and self.state.reference_step:
            weights = {name: tensor.clone() for name, tensor in self.reference.full_parameters() if self.rank == 0}
            if self.rank == 0:
                save_file(weights, directory / _REFERENCE)
        if self.settings.trainer.save_hf:
            self.export(str(directory / "hf"))
        if self.rank == 0:
            self.state.save(directory)

    def _restore(self, directory: Path) -> None:
        self.policy.load(directory / "policy")
        if self.critic is not None:
            self.critic.load(directory / "critic")
        self.state = RlState.load(directory)
        if self.reference is not None and self.state.reference_step:
            _copy_into(self.reference, load_file(directory / _REFERENCE).items())

    def _frozen(self, name: str, make: Callable[[Path], TrainEngine]) -> TrainEngine | None:
        """An engine of the input artifact's model that is not trained; None where the job has no such input."""
        if name not in self.job.manifests:
            return None
        return make(self.job.input_path(name) / "model")


def over_steps(steps: Sequence[StepResult]) -> dict[str, float]:
    """The optimizer steps of a rollout in one: metrics by what they counted, the rest as means over the steps."""
    if not steps:
        return {}
    each = {name: float(np.mean([getattr(step, name) for step in steps])) for name in ("loss", "grad_norm", "lr")}
    return {**each, **means(*(step.metrics for step in steps))}


def _item(trajectory: Trajectory) -> Item:
    return trajectory_item(trajectory.prompt_ids, trajectory.response_ids, trajectory.action_mask)


def _numbers(micro: MicroBatch) -> list[int]:
    """Of the items of a micro-batch, in the order in which they lie there."""
    return [number for row in micro for number in row]


def _in_order(numbers: Sequence[Sequence[int]], shards: Sequence[Sequence[Scored]]) -> list[Scored]:
    """Every rank's trajectories in the order of the rollout."""
    found = {
        number: one for own, shard in zip(numbers, shards, strict=True) for number, one in zip(own, shard, strict=False)
    }
    return [found[number] for number in range(len(found))]


def _copy_into(engine: TrainEngine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Sets the parameters of a frozen model by name. Every rank calls this."""
    parameters = {bare_name(name): parameter for name, parameter in engine.module.named_parameters()}
    for name, tensor in weights:
        with gathered([parameters[name]], engine.zero_stage, modifier_rank=0), torch.no_grad():
            parameters[name].copy_(tensor)


def _order_seed(seed: int, step: int) -> int:
    """A seed for each step: SampleOrder then derives one for each epoch."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
