"""Whether the demo's task can be learned: SFT, reward model and PPO in plain PyTorch, one thread, no engine.

    OMP_NUM_THREADS=1 python tests/benchmarks/demo_task.py --seeds 0 1 2

Prints, for each seed: greedy exact match on all held-out problems after SFT, the reward model's accuracy on held-out
pairs, and PPO's curve with the demo's reward (reward model and verifier) and with the reward model alone. Every field
of `Settings` is an option, e.g. `--ppo-steps 40`. docs/demo-task.md has the figures, and what is not yet reached.
"""

import argparse
import copy
import dataclasses
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlhf_core.data.arithmetic import ArithmeticSpec, Row, pair_rows, prompt_rows, sft_rows, verify
from rlhf_core.models.scratch import write_scratch_model


@dataclasses.dataclass
class Settings:
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 384
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    sft_rows: int = 200
    sft_steps: int = 140
    sft_batch: int = 64
    sft_lr: float = 2e-3
    sft_warmup: int = 10
    sft_cosine: int = 1

    rm_rows: int = 8000
    rm_steps: int = 250
    rm_batch: int = 64
    rm_lr: float = 1e-3
    rm_warmup: int = 20
    rm_cosine: int = 1

    ppo_steps: int = 60
    ppo_prompts: int = 64
    ppo_samples: int = 4
    ppo_epochs: int = 1
    ppo_minibatch: int = 64
    ppo_lr: float = 3e-5
    ppo_warmup: int = 3
    critic_lr: float = 3e-4
    critic_from_rm: int = 0
    critic_warmup: int = 0  # first PPO steps in which only the critic is trained
    gae_lambda: float = 1.0
    policy_clip: float = 0.2
    value_clip: float = 2.0
    kl_coef: float = 0.02
    rm_weight: float = 0.25
    verifier_weight: float = 1.0
    rm_only_weight: float = 1.0
    max_new_tokens: int = 20
    eval_every: int = 5


class Scorer(nn.Module):
    """A Llama backbone with a scalar at every token; the reward is the scalar at the last token (EOS)."""

    def __init__(self, policy: LlamaForCausalLM) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(policy.model)
        self.head = nn.Linear(policy.config.hidden_size, 1, bias=False)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(policy.config.hidden_size + 1))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.backbone(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)[0]
        return self.head(hidden).squeeze(-1)


@dataclasses.dataclass
class Batch:
    """ids, mask, action: (B, T); mask is 1 at tokens, action is True at response tokens (the EOS included)."""

    ids: Tensor
    mask: Tensor
    action: Tensor

    def rows(self, index: Tensor) -> "Batch":
        return Batch(self.ids[index], self.mask[index], self.action[index])


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


class Codec:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.eos, self.pad = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, tokenizer.pad_token])

    def prompt(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(rendered)["input_ids"]

    def response(self, text: str) -> list[int]:
        return [*self.tokenizer(text)["input_ids"], self.eos]

    def batch(self, prompts: list[list[int]], responses: list[list[int]]) -> Batch:
        length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        ids = torch.full((len(prompts), length), self.pad)
        mask = torch.zeros_like(ids)
        action = torch.zeros_like(ids, dtype=torch.bool)
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
            ids[i, : len(p) + len(r)] = torch.tensor(p + r)
            mask[i, : len(p) + len(r)] = 1
            action[i, len(p) : len(p) + len(r)] = True
        return Batch(ids, mask, action)

    def text(self, response: list[int]) -> str:
        return self.tokenizer.decode(response, skip_special_tokens=True)


def logprobs(policy: LlamaForCausalLM, batch: Batch) -> Tensor:
    """(B, T): log-probability of each token given those before it; 0 at the first."""
    out = policy(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions(batch.mask), use_cache=False
    ).logits
    picked = out[:, :-1].log_softmax(-1).gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    return F.pad(picked, (1, 0))


@torch.no_grad()
def generate(
    policy: LlamaForCausalLM,
    codec: Codec,
    prompts: list[list[int]],
    max_new_tokens: int,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Responses with their EOS where it came; greedy without a generator, else sampled at temperature 1."""
    width = max(map(len, prompts))
    ids = torch.tensor([[codec.pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    cache, tokens, alive = None, ids, torch.ones(len(prompts), dtype=torch.bool)
    drawn: list[Tensor] = []
    for _ in range(max_new_tokens):
        out = policy(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions(mask)[:, -tokens.shape[1] :],
            past_key_values=cache,
            use_cache=True,
        )
        cache, scores = out.past_key_values, out.logits[:, -1]
        if generator is None:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        tokens[~alive] = codec.pad
        drawn.append(tokens)
        alive &= tokens[:, 0] != codec.eos
        mask = F.pad(mask, (0, 1), value=1)
        if not alive.any():
            break
    responses = torch.cat(drawn, 1).tolist()
    return [r[: r.index(codec.eos) + 1] if codec.eos in r else r for r in responses]


def exact_match(policy: LlamaForCausalLM, codec: Codec, rows: list[Row], max_new_tokens: int) -> float:
    """Share of rows whose greedy completion is verified."""
    responses = generate(policy, codec, [codec.prompt(r["prompt"]) for r in rows], max_new_tokens, None)
    return sum(verify(codec.text(r), row["label"]) for r, row in zip(responses, rows, strict=True)) / len(rows)


def schedule(lr: float, step: int, steps: int, warmup: int, cosine: int) -> float:
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))) if cosine else lr


def epochs(rows: list[Row], batch: int, steps: int, rng: random.Random) -> Iterator[list[Row]]:
    """`steps` batches in shuffled passes; a pass's incomplete last batch is filled from the next."""
    queue: list[Row] = []
    for _ in range(steps):
        while len(queue) < batch:
            queue += rng.sample(rows, len(rows))
        taken, queue = queue[:batch], queue[batch:]
        yield taken


def adam(module: nn.Module, s: Settings) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=s.weight_decay)


def update(optimizer: torch.optim.Optimizer, module: nn.Module, loss: Tensor, lr: float, s: Settings) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), s.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def train_sft(policy: LlamaForCausalLM, codec: Codec, s: Settings, seed: int) -> None:
    rows = sft_rows(ArithmeticSpec(seed, s.sft_rows))
    optimizer = adam(policy, s)
    for step, taken in enumerate(epochs(rows, s.sft_batch, s.sft_steps, random.Random(seed))):
        batch = codec.batch([codec.prompt(r["prompt"]) for r in taken], [codec.response(r["response"]) for r in taken])
        loss = -logprobs(policy, batch)[batch.action].mean()
        update(optimizer, policy, loss, schedule(s.sft_lr, step, s.sft_steps, s.sft_warmup, s.sft_cosine), s)


def scores(scorer: Scorer, batch: Batch) -> Tensor:
    """(B,): the scalar at each row's last token."""
    last = batch.mask.sum(-1) - 1
    return scorer(batch.ids, batch.mask).gather(-1, last[:, None]).squeeze(-1)


def pair_scores(scorer: Scorer, codec: Codec, rows: list[Row]) -> tuple[Tensor, Tensor]:
    prompts = [codec.prompt(r["prompt"]) for r in rows] * 2
    responses = [codec.response(r["chosen"]) for r in rows] + [codec.response(r["rejected"]) for r in rows]
    chosen, rejected = scores(scorer, codec.batch(prompts, responses)).chunk(2)
    return chosen, rejected


def train_rm(sft: LlamaForCausalLM, codec: Codec, s: Settings, seed: int) -> tuple[Scorer, float, float, float]:
    """The reward model, its accuracy on held-out pairs, and mean and std of its scores there."""
    scorer = Scorer(sft)
    rows = pair_rows(ArithmeticSpec(seed, s.rm_rows))
    optimizer = adam(scorer, s)
    for step, taken in enumerate(epochs(rows, s.rm_batch, s.rm_steps, random.Random(seed))):
        chosen, rejected = pair_scores(scorer, codec, taken)
        loss = -F.logsigmoid(chosen - rejected).mean()
        update(optimizer, scorer, loss, schedule(s.rm_lr, step, s.rm_steps, s.rm_warmup, s.rm_cosine), s)
    with torch.no_grad():
        chosen, rejected = pair_scores(scorer, codec, pair_rows(ArithmeticSpec(seed, 1000, split="heldout")))
    both = torch.cat([chosen, rejected])
    return scorer, (chosen > rejected).float().mean().item(), both.mean().item(), both.std().item()


def gae(rewards: Tensor, values: Tensor, action: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, T), gamma 1; the response is contiguous (Schulman et al. 2016, 1506.02438)."""
    advantages = torch.zeros_like(rewards)
    running = torch.zeros(len(rewards))
    following = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = action[:, t].float()
        running = here * (rewards[:, t] + following - values[:, t] + lam * running)
        following = here * values[:, t]
        advantages[:, t] = running
    return advantages, (advantages + values) * action


@dataclasses.dataclass
class Experience:
    batch: Batch
    old: Tensor  # log-probs at sampling, (B, T)
    values: Tensor
    advantages: Tensor
    returns: Tensor


class Ppo:
    def __init__(self, sft: LlamaForCausalLM, rm: tuple[Scorer, float, float], codec: Codec, s: Settings, seed: int):
        self.s, self.codec = s, codec
        self.reference, self.policy = sft, copy.deepcopy(sft)
        self.scorer, self.mean, self.std = rm
        self.critic = copy.deepcopy(self.scorer) if s.critic_from_rm else Scorer(sft)
        nn.init.zeros_(self.critic.head.weight)
        self.optimizers = adam(self.policy, s), adam(self.critic, s)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def rollout(self, rows: list[Row], weights: tuple[float, float]) -> tuple[Experience, dict[str, float]]:
        rows = [r for r in rows for _ in range(self.s.ppo_samples)]
        prompts = [self.codec.prompt(r["prompt"]) for r in rows]
        responses = generate(self.policy, self.codec, prompts, self.s.max_new_tokens, self.generator)
        batch = self.codec.batch(prompts, responses)
        exact = torch.tensor(
            [float(verify(self.codec.text(r), row["label"])) for r, row in zip(responses, rows, strict=True)]
        )
        rm = (scores(self.scorer, batch) - self.mean) / self.std
        old, reference = logprobs(self.policy, batch), logprobs(self.reference, batch)
        # The value at token t is what the critic sees before t is drawn: its output at t - 1.
        values = F.pad(self.critic(batch.ids, batch.mask)[:, :-1], (1, 0)) * batch.action
        kl = (old - reference) * batch.action
        rewards = -self.s.kl_coef * kl
        rewards[torch.arange(len(rows)), batch.mask.sum(-1) - 1] += weights[0] * rm + weights[1] * exact
        advantages, returns = gae(rewards, values, batch.action, self.s.gae_lambda)
        valid = advantages[batch.action]
        advantages = (advantages - valid.mean()) / (valid.std() + 1e-8)
        metrics = {"rm": rm.mean().item(), "exact": exact.mean().item(), "kl": kl.sum(-1).mean().item()}
        residual, total = (returns - values)[batch.action].var(), returns[batch.action].var()
        metrics["explained"] = (1 - residual / total).item()
        return Experience(batch, old, values, advantages, returns), metrics

    def learn(self, e: Experience, step: int, rng: random.Random) -> None:
        s = self.s
        for _ in range(s.ppo_epochs):
            order = torch.tensor(rng.sample(range(len(e.old)), len(e.old)))
            for index in order.split(s.ppo_minibatch):
                batch = e.batch.rows(index)
                on = batch.action
                values = F.pad(self.critic(batch.ids, batch.mask)[:, :-1], (1, 0))[on]
                old_values, returns = e.values[index][on], e.returns[index][on]
                near = old_values + (values - old_values).clamp(-s.value_clip, s.value_clip)
                value_loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
                update(self.optimizers[1], self.critic, value_loss, s.critic_lr, s)
                if step < s.critic_warmup:
                    continue
                ratio = (logprobs(self.policy, batch)[on] - e.old[index][on]).exp()
                gain = e.advantages[index][on]
                clipped = ratio.clamp(1 - s.policy_clip, 1 + s.policy_clip)
                loss = -torch.minimum(ratio * gain, clipped * gain).mean()
                update(
                    self.optimizers[0],
                    self.policy,
                    loss,
                    schedule(s.ppo_lr, step - s.critic_warmup, s.ppo_steps, s.ppo_warmup, 0),
                    s,
                )


def train_ppo(
    sft: LlamaForCausalLM,
    rm: tuple[Scorer, float, float],
    codec: Codec,
    s: Settings,
    seed: int,
    weights: tuple[float, float],
    name: str,
) -> float:
    """Runs PPO, prints its curve, returns the last exact match on held-out problems."""
    rows = prompt_rows(ArithmeticSpec(seed))
    heldout = prompt_rows(ArithmeticSpec(seed, split="heldout"))
    ppo = Ppo(sft, rm, codec, s, seed)
    rng = random.Random(seed)
    start, match = time.perf_counter(), 0.0
    for step, taken in enumerate(epochs(rows, s.ppo_prompts, s.ppo_steps, rng)):
        experience, metrics = ppo.rollout(taken, weights)
        ppo.learn(experience, step, rng)
        if (step + 1) % s.eval_every == 0 or step + 1 == s.ppo_steps:
            match = exact_match(ppo.policy, codec, heldout, s.max_new_tokens)
            shown = {k: round(v, 3) for k, v in metrics.items()}
            report(
                seed=seed,
                phase=name,
                step=step + 1,
                heldout=round(match, 3),
                **shown,
                seconds=round(time.perf_counter() - start, 1),
            )
    return match


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def run(s: Settings, seed: int, phases: list[str]) -> None:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as directory:
        write_scratch_model(
            directory,
            hidden_size=s.hidden_size,
            layers=s.layers,
            heads=s.heads,
            kv_heads=s.kv_heads,
            intermediate_size=s.intermediate_size,
            max_position=64,
            seed=seed,
        )
        policy = LlamaForCausalLM.from_pretrained(directory)
        codec = Codec(AutoTokenizer.from_pretrained(directory))
    heldout = prompt_rows(ArithmeticSpec(seed, split="heldout"))
    start = time.perf_counter()
    train_sft(policy, codec, s, seed)
    seconds = round(time.perf_counter() - start, 1)
    before = exact_match(policy, codec, heldout, s.max_new_tokens)
    report(seed=seed, phase="sft", heldout=round(before, 3), seconds=seconds)
    if phases == ["sft"]:
        return
    start = time.perf_counter()
    scorer, accuracy, mean, std = train_rm(policy, codec, s, seed)
    report(
        seed=seed,
        phase="rm",
        accuracy=round(accuracy, 3),
        mean=round(mean, 2),
        std=round(std, 2),
        seconds=round(time.perf_counter() - start, 1),
    )
    rewards = {"ppo": (s.rm_weight, s.verifier_weight), "ppo-rm-only": (s.rm_only_weight, 0.0)}
    for name, weights in rewards.items():
        if name in phases:
            after = train_ppo(policy, (scorer, mean, std), codec, s, seed, weights, name)
            report(seed=seed, phase=f"{name}-result", before=round(before, 3), after=round(after, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--phases", nargs="+", default=["sft", "rm", "ppo", "ppo-rm-only"])
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    seeds, phases = options.pop("seeds"), options.pop("phases")
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    for seed in seeds:
        run(Settings(**options), seed, phases)


if __name__ == "__main__":
    sys.exit(main())
