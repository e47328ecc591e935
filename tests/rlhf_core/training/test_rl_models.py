"""RL's trainer and its models: adapters with their base as the reference, experts, ranks that share samples."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_core.rollout.trajectory import Trajectory
from rlhf_core.rollout.weight_transfer import load_bucket, read_index, read_model_spec, read_transfer

sys.path.insert(0, str(Path(__file__).parent))
from rl_jobs import OPTIMIZER, PTX, process_model, rollout, rollout_job

pytestmark = pytest.mark.engines

LORA = {"rank": 2, "alpha": 8.0}
KL = {"kl": {"coef": 0.1, "estimator": "k3", "place": "loss"}}
COMMA = 18


def logprobs_of(directory: str | Path, t: Any) -> Tensor:
    """Of the response's tokens, by transformers' forward."""
    ids = torch.tensor([*t.prompt_ids, *t.response_ids])
    start = len(t.prompt_ids)
    logits = AutoModelForCausalLM.from_pretrained(directory)(ids[None]).logits[0]
    return torch.log_softmax(logits, -1)[start - 1 : -1].gather(-1, ids[start:, None])[:, 0]


@pytest.mark.parametrize(
    ("model", "ranks", "zero_stage", "packing"),
    [("llama", 1, 2, False), ("llama", 2, 3, True), ("mixtral", 2, 3, False)],
)
def test_adapters_are_trained_against_their_base(
    groups: Any,
    request: pytest.FixtureRequest,
    trajectories: Any,
    tmp_path: Path,
    model: str,
    ranks: int,
    zero_stage: int,
    packing: bool,
) -> None:
    """The reference stays what the policy was, the sampler gets the merged weights, and the export has both."""
    base = request.getfixturevalue(model)
    trainer = {"ranks": ranks, "zero_stage": zero_stage, "packing": packing, "experts_implementation": "eager"}
    balanced = {"aux_loss_coef": 0.1} if model == "mixtral" else {}
    settings = {"lora": LORA, "ptx": PTX, "algorithm": {"preset": "grpo", **KL}, **balanced}
    job = rollout_job(tmp_path / "run", {"policy": base}, trainer, **settings)
    given = rollout(trajectories)
    out = tmp_path / "out"
    done = groups[ranks].run("rl_programs:trained", job=job, trajectories=given, steps=2, directory=str(out))[0]

    first, *_, last = done["scored"]
    for before, after, t in zip(first, last, given, strict=True):
        assert np.array_equal(before.ref_logprobs, before.logprobs)  # B is 0 at the start
        expected = logprobs_of(base, t).tolist()
        assert before.ref_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
        assert np.array_equal(after.ref_logprobs, before.ref_logprobs)
        assert after.logprobs.tolist() == pytest.approx(logprobs_of(out / "model", t).tolist(), abs=1e-4)
    assert max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(first, last, strict=True)) > 0.01
    assert done["metrics"][0]["kl"] == 0 != done["metrics"][1]["kl"]
    assert all(metrics["policy/ptx_loss"] > 0 for metrics in done["metrics"])
    assert ("policy/aux" in done["metrics"][0]) == (model == "mixtral")

    index = read_index(done["index"])
    sent = {name: tensor for b in index.buckets for name, tensor in load_bucket(index.path.parent / b.file).items()}
    whole = dict(AutoModelForCausalLM.from_pretrained(out / "model").named_parameters())
    assert sent.keys() == whole.keys()
    assert all(torch.equal(sent[name], whole[name]) for name in sent)
    if model == "llama":
        read_transfer(index, read_model_spec(base, torch.float32))
    adapter = out / "model" / "adapter"
    assert {"tokenizer.json", "generation_config.json", "adapter_config.json"} <= {
        path.name for path in adapter.iterdir()
    }
    assert json.loads((adapter / "base.json").read_text())["path"] == f"sft/{job.manifests['policy'].key}"
    assert any(
        tensor.any() for name, tensor in load_file(adapter / "adapter_model.safetensors").items() if "lora_B" in name
    )


FROZEN, CRITIC_FROZEN = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"


class Runs:
    """Runs with a model of every kind. Of a layout and settings each is made once."""

    def __init__(self, groups: Any, models: dict[str, str], trajectories: list[Any], directory: Path):
        self._groups, self._models, self._trajectories, self._directory = groups, models, trajectories, directory
        self._made: dict[str, Any] = {}

    def of(self, ranks: int, trainer: dict[str, Any], **settings: Any) -> dict[str, Any]:
        name = f"{ranks} {trainer} {settings}"
        if name not in self._made:
            self._made[name] = self._run(self._directory / str(len(self._made)), ranks, trainer, settings)
        return self._made[name]

    def _run(self, directory: Path, ranks: int, trainer: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        common: dict[str, Any] = {
            "critic": {"optimizer": OPTIMIZER, "freeze": [r"layers\.0\.mlp\.up"]},
            "reward": {"rm": 1.0, "prm": 1.0},
            "freeze": ["embed_tokens"],
            "ptx": PTX,
        }
        job = rollout_job(directory, self._models, {"ranks": ranks, **trainer}, **{**common, **settings})
        given = {"job": job, "trajectories": self._trajectories, "steps": 2, "directory": str(directory / "out")}
        done = self._groups[ranks].run("rl_programs:trained", **given)[0]
        return {**done, "policy": load_file(directory / "out" / "model" / "model.safetensors")}


@pytest.fixture(scope="module")
def runs(
    groups: Any, llama_two: str, scorer_two: str, trajectories: Any, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    directory = tmp_path_factory.mktemp("runs")
    models = {"policy": llama_two, "reward": scorer_two, "process": process_model(llama_two, directory / "process")}
    return Runs(groups, models, [with_steps(t) for t in rollout(trajectories)], directory)


def with_steps(t: Trajectory) -> Trajectory:
    """A comma at the beginning and one near the end, where the process reward model looks for steps."""
    ids = t.response_ids.copy()
    ids[:: max(2, len(ids) - 1)] = COMMA
    return replace(t, response_ids=ids)


@pytest.mark.parametrize(
    ("trainer", "settings"),
    [
        ({"tensor_parallel": 2, "zero_stage": 2}, {}),
        ({"tensor_parallel": 2, "zero_stage": 3}, {}),
        ({"sequence_parallel": 2, "zero_stage": 2}, {}),
        ({"sequence_parallel": 2, "zero_stage": 3}, {"lora": LORA}),
    ],
)
def test_ranks_that_share_samples_do_what_one_rank_does(runs: Runs, trainer: Any, settings: Any) -> None:
    one, shared = runs.of(1, {"zero_stage": 2}, **settings), runs.of(2, trainer, **settings)
    for ours, theirs in zip(shared["judged"], one["judged"], strict=True):
        assert ours.reward_score == pytest.approx(theirs.reward_score, abs=1e-4)
        assert ours.step_scores.tolist() == pytest.approx(theirs.step_scores.tolist(), abs=1e-4)
        assert ours.step_ends == theirs.step_ends
    for ours, theirs in zip(shared["scored"][0], one["scored"][0], strict=True):
        for name in ("logprobs", "ref_logprobs", "entropy", "values"):
            assert getattr(ours, name).tolist() == pytest.approx(getattr(theirs, name).tolist(), abs=1e-4)
    for name in ("policy", "critic"):
        ours, theirs = shared[name], one[name]
        assert ours.keys() == theirs.keys()
        assert max(float(abs(ours[n] - theirs[n]).max()) for n in theirs) < 1e-4
    for name in ("policy/loss", "policy/ptx_loss", "critic/loss", "kl"):
        ours, theirs = ([metrics[name] for metrics in run["metrics"]] for run in (shared, one))
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert shared["state"].ptx_position == one["state"].ptx_position == 2 * 2 * 3


def test_frozen_parameters_of_policy_and_critic_stay(runs: Runs, llama_two: str) -> None:
    """And others move, of both."""
    one = runs.of(1, {"zero_stage": 2})
    before = load_file(Path(llama_two) / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], one["policy"][name])}
    assert before.keys() - moved == {FROZEN}
    moved = {name for name, array in one["critic"].items() if not np.array_equal(array, one["critic before"][name])}
    assert one["critic"].keys() - moved == {CRITIC_FROZEN}
