"""Trajectories as items of data/layout.py: dealt to ranks by their tokens, cut into micro-batches, packed or padded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config.rl import PpoSettings
from rlhf_core.config.training import TrainerSettings
from rlhf_core.data.batches import SampleOrder, chunks
from rlhf_core.data.layout import Layout, MicroBatch, make_batch, plan_step
from rlhf_core.data.samples import Item, Sample
from rlhf_core.training.experience import Experience
from rlhf_core.training.mesh import mesh_of
from rlhf_core.training.objective import Batch
from rlhf_core.training.rl_objectives import PTX


def rollout_layout(settings: PpoSettings) -> Layout:
    """No trajectory is longer than what the sampler's model takes."""
    return _layout(settings.trainer, settings.sampler.max_model_len)


def ptx_layout(settings: PpoSettings, max_len: int) -> Layout:
    """Of rows of at most max_len tokens."""
    return _layout(settings.trainer, max_len)


def _layout(trainer: TrainerSettings, capacity: int) -> Layout:
    ranks, multiple = mesh_of(trainer, 0).data_ranks, trainer.sequence_parallel
    return Layout(ranks, trainer.micro_batch_size, trainer.packing, capacity, multiple)


@dataclass(frozen=True)
class Share:
    """One rank's part of a rollout: numbers of its trajectories, and its micro-batches of places in `numbers`.

    Every rank has the same number of micro-batches; one without any is filled with an item of no weight. A rank never
    has no trajectory at all: where there are fewer than ranks, it holds the first, in none of its micro-batches.
    """

    numbers: list[int]
    micro_batches: list[MicroBatch]


def shares(lengths: Sequence[int], layout: Layout, peers: int = 1) -> list[Share]:
    """Each rank's part of trajectories of `lengths` tokens; so many `peers`, consecutive ranks, have the same one."""
    made = []
    for plan in plan_step(lengths, layout):
        numbers = [number for micro in plan for row in micro for number in row]
        place = {number: at for at, number in enumerate(numbers)}
        made.append(Share(numbers or [0], [[[place[number] for number in row] for row in micro] for micro in plan]))
    return [share for share in made for _ in range(peers)]


def optimizer_steps(trajectories: int, batch_size: int, epochs: int, seed: int) -> Iterator[Sequence[int]]:
    """Numbers of the trajectories of each optimizer step: every trajectory once an epoch, each epoch in an order of its
    own, whatever the ranks. An epoch's last step is smaller where batch_size does not divide the trajectories."""
    order = SampleOrder(trajectories, seed)
    for epoch in range(epochs):
        yield from chunks(order.ids(epoch * trajectories, trajectories), batch_size)


def trajectory_item(prompt_ids: np.ndarray, response_ids: np.ndarray, action_mask: np.ndarray) -> Item:
    """Prompt and response as one sample, whose action tokens have weight 1."""
    weights = np.concatenate([np.zeros(len(prompt_ids)), action_mask]).astype(np.float32)
    return Item((Sample(np.concatenate([prompt_ids, response_ids]).astype(np.int32), weights),))


def by_item(values_RL: Tensor, batch: Batch) -> list[Tensor]:
    """The values of each item's own tokens, prompt and response, in the order in which the items lie in the batch."""
    return [values_RL[batch["segments"] == number] for number in range(len(batch["real"]))]


def experience_batches(
    experience: Experience, numbers: Sequence[int], layout: Layout, rank: int, pad_token_id: int
) -> list[Batch]:
    """A rank's micro-batches of the optimizer step on trajectories `numbers`."""
    items = [
        trajectory_item(s.prompt_ids, s.response_ids, s.action_mask) for s in (experience.scored[i] for i in numbers)
    ]
    plan = plan_step([item.tokens for item in items], layout)[rank]
    return [_experience_batch(experience, numbers, items, micro, layout, pad_token_id) for micro in plan]


def ptx_batches(items: Sequence[Item], layout: Layout, rank: int, pad_token_id: int) -> list[Batch]:
    """A rank's micro-batches of the SFT rows of an optimizer step, marked for `PtxObjective`."""
    plan = plan_step([item.tokens for item in items], layout)[rank]
    return [{**make_batch(items, micro, layout, pad_token_id), PTX: torch.ones(())} for micro in plan]


def _experience_batch(
    experience: Experience,
    numbers: Sequence[int],
    items: Sequence[Item],
    micro: MicroBatch,
    layout: Layout,
    pad_token_id: int,
) -> Batch:
    """`make_batch`, and (R, L) float32 for what is known of each response token, 0 elsewhere.

    old_logprobs, advantages, loss_weights; ref_logprobs with a reference; old_values, returns with a critic.
    """
    batch = make_batch(items, micro, layout, pad_token_id)
    chosen = [numbers[place] for row in micro or [[0]] for place in row]
    scored = [experience.scored[number] for number in chosen]
    rows: dict[str, list[Any]] = {
        "old_logprobs": [s.logprobs for s in scored],
        "advantages": [experience.advantages[number].numpy() for number in chosen],
        "loss_weights": [experience.weights[number].numpy() for number in chosen],
    }
    if all(s.ref_logprobs is not None for s in scored):
        rows["ref_logprobs"] = [s.ref_logprobs for s in scored]
    if experience.returns is not None:
        rows["old_values"] = [s.values for s in scored]
        rows["returns"] = [experience.returns[number].numpy() for number in chosen]
    # Row by row the tokens that are no fill are those of the items in their order.
    place = batch["segments"] >= 0
    for name, values in rows.items():
        flat = [
            np.concatenate([np.zeros(len(s.prompt_ids)), value[: len(s.response_ids)]])
            for s, value in zip(scored, values, strict=True)
        ]
        tensor = torch.zeros(place.shape)
        tensor[place] = torch.from_numpy(np.concatenate(flat).astype(np.float32))
        batch[name] = tensor
    return batch
