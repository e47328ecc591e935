"""The DeepSpeed engine on real ranks: resume to the bit, master weights, whole parameters, schedules, empty steps."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.engines

EOS = 2  # of the scratch model's tokenizer
ADAM = {"lr": 5e-3, "weight_decay": 0.1, "warmup_ratio": 0.2, "schedule": "cosine"}


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Every tensor and number in a directory of DeepSpeed's files, by file and place."""
    found: dict[str, Tensor] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, Tensor):
            found[place] = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[place] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{place}/{name}")
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                walk(inner, f"{place}/{number}")

    for file in sorted(path.rglob("*.pt")):
        walk(torch.load(file, weights_only=False), str(file.relative_to(path)))
    return found


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "model"),
    [
        (0, "float32", "llama"),
        (1, "float32", "llama"),
        (2, "float32", "llama_dropout"),
        (3, "float32", "llama"),
        (0, "bfloat16", "llama"),
        (2, "bfloat16", "llama"),
        (3, "bfloat16", "llama_dropout"),
    ],
)
def test_resume_is_bit_equal(
    groups: Any,
    request: pytest.FixtureRequest,
    exchanges: Any,
    tmp_path: Path,
    zero_stage: int,
    dtype: str,
    model: str,
) -> None:
    done = groups[2].run(
        "resume",
        model=request.getfixturevalue(model),
        trainer={"ranks": 2, "zero_stage": zero_stage, "micro_batch_size": 2},
        dtype=dtype,
        samples=exchanges,
        before=3,
        after=3,
        optimizer=ADAM,
        directory=str(tmp_path),
    )
    for rank in done:
        assert rank["resumed"] == rank["straight"]  # losses and learning rates, to the bit
        assert rank["resumed_digest"] == rank["straight_digest"] == done[0]["straight_digest"]
        assert len({lr for _, lr in rank["straight"]}) > 3  # the schedule moves, so going on with it shows
        assert len({loss for loss, _ in rank["straight"]}) == 6
    straight, resumed = tensors_of(tmp_path / "straight"), tensors_of(tmp_path / "resumed")
    moments = [place for place in straight if "exp_avg" in place]
    assert len(moments) >= 2
    assert all(straight[place].abs().sum() > 0 for place in moments if "exp_avg_sq" in place)
    assert straight.keys() == resumed.keys()
    different = [place for place in straight if not torch.equal(straight[place], resumed[place])]
    assert different == []


@pytest.mark.parametrize(
    "trainer",
    [
        {"tensor_parallel": 2, "zero_stage": 2},
        {"tensor_parallel": 2, "zero_stage": 3},
        {"sequence_parallel": 2, "zero_stage": 2},
        {"sequence_parallel": 2, "zero_stage": 3},
        {"offload_optimizer": True, "zero_stage": 2},
        {"zpg": 2, "zero_stage": 3},
    ],
)
def test_resume_of_other_layouts_is_bit_equal(
    groups: Any, llama_two: str, exchanges: Any, tmp_path: Path, trainer: dict[str, Any]
) -> None:
    """Weights, and the moving average, which the program keeps as well."""
    given = {"model": llama_two, "dtype": "bfloat16", "samples": exchanges, "optimizer": ADAM}
    layout = {"ranks": 2, "micro_batch_size": 2, **trainer}
    done = groups[2].run("resume", **given, trainer=layout, before=2, after=2, directory=str(tmp_path))
    for rank in done:
        assert rank["resumed"] == rank["straight"]
        assert rank["resumed_digest"] == rank["straight_digest"] == done[0]["straight_digest"]
    averages = sorted((tmp_path / "straight").rglob("ema-*.safetensors"))
    assert averages
    for path in averages:
        straight, resumed = load_file(path), load_file(tmp_path / "resumed" / path.relative_to(tmp_path / "straight"))
        assert straight.keys() == resumed.keys()
        assert all(np.array_equal(array, resumed[name]) for name, array in straight.items())


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_checkpoint_before_any_step(groups: Any, llama: str, exchanges: Any, tmp_path: Path, zero_stage: int) -> None:
    """PPO saves a policy that has not been trained yet while the critic warms up."""
    trainer = {"ranks": 2, "zero_stage": zero_stage, "micro_batch_size": 2}
    given = {"model": llama, "trainer": trainer, "dtype": "float32", "samples": exchanges, "optimizer": ADAM}
    done = groups[2].run("resume", **given, before=0, after=2, directory=str(tmp_path))
    for rank in done:
        assert rank["resumed"] == rank["straight"]
        assert rank["resumed_digest"] == rank["straight_digest"]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bfloat16_trains_master_weights_in_float32(groups: Any, llama: str, exchanges: Any, zero_stage: int) -> None:
    """Norm weights start at 1, where bfloat16's neighbour below is 1 - 2**-8: no single update of 5e-4 can move them,
    twelve of them in float32 can.
    """
    assert torch.tensor(1.0, dtype=torch.bfloat16) - 5e-4 == 1.0
    trained = groups[2].run(
        "train",
        kind="sft",
        model=llama,
        trainer={"ranks": 2, "zero_stage": zero_stage, "micro_batch_size": 2},
        samples=exchanges,
        steps=12,
        dtype="bfloat16",
        optimizer={"lr": 5e-4, "schedule": "constant", "warmup_ratio": 0.0},
    )[0]
    norms = {name: array for name, array in trained["parameters"].items() if "norm" in name}
    assert len(norms) == 5
    moved = sum(int((array != 1.0).sum()) for array in norms.values())
    assert moved > 20
    assert trained["loss"][-1] < trained["loss"][0]
    assert all(math.isfinite(norm) and norm > 0 for norm in trained["grad_norm"])


@pytest.mark.parametrize(
    ("kind", "model", "trainer"),
    [
        ("sft", "llama", {}),
        ("sft", "llama_tied", {"ranks": 2, "zero_stage": 3}),
        ("rm", "scorer", {"ranks": 2, "zero_stage": 3}),
        ("sft", "llama_tied_two", {"ranks": 2, "tensor_parallel": 2}),
        ("sft", "llama_two", {"ranks": 2, "tensor_parallel": 2, "zero_stage": 3}),
        ("rm", "scorer_two", {"ranks": 2, "tensor_parallel": 2}),
    ],
)
def test_full_parameters_are_those_of_the_checkpoint(
    groups: Any, request: pytest.FixtureRequest, kind: str, model: str, trainer: dict[str, Any]
) -> None:
    directory = request.getfixturevalue(model)
    wanted = load_file(Path(directory) / "model.safetensors")
    for found in groups[trainer.get("ranks", 1)].run(
        "gathered", kind=kind, model=directory, trainer=trainer, bucket=3000
    ):
        assert found.keys() == wanted.keys()
        for name, array in found.items():
            assert np.array_equal(array, wanted[name]), name


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        ("llama", {"ranks": 1, "zero_stage": 0}),
        ("llama", {"ranks": 2, "zero_stage": 3}),
        ("llama_tied", {"ranks": 2, "zero_stage": 2}),
        ("llama_tied_two", {"ranks": 2, "tensor_parallel": 2}),
    ],
)
def test_exported_policy_loads_as_a_causal_model(
    groups: Any,
    request: pytest.FixtureRequest,
    exchanges: Any,
    tmp_path: Path,
    model: str,
    trainer: dict[str, Any],
) -> None:
    directory = request.getfixturevalue(model)
    given = {"kind": "sft", "model": directory, "trainer": trainer, "samples": exchanges}
    groups[trainer["ranks"]].run("export", **given, directory=str(tmp_path / "exported"))
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert exported.config.tie_word_embeddings == model.startswith("llama_tied")
    before = AutoModelForCausalLM.from_pretrained(directory)
    for (name, old), new in zip(before.named_parameters(), exported.parameters(), strict=True):
        assert not torch.equal(old, new), name  # the step is in it


def without_pad(directory: str, to: Path) -> int:
    """Makes `to` a copy whose tokenizer has no pad token; the id of the one that is then chosen."""
    shutil.copytree(directory, to)
    config = json.loads((to / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(to).pad_token_id


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 0), (2, 3)])
def test_exported_reward_model_gives_the_scores_it_was_trained_with(
    groups: Any, llama: str, scorer: str, pairs: Any, tmp_path: Path, ranks: int, zero_stage: int, padded: bool
) -> None:
    """In Hugging Face's own forward, alone, padded right and padded left beside longer rows; all end in EOS.

    With the tokenizer's own pad token, and with the one chosen where it has none.
    """
    pad = 0 if padded else without_pad(llama, tmp_path / "without")
    pairs = [tuple(((*ids, EOS), start) for ids, start in pair) for pair in pairs]
    trainer = {"ranks": ranks, "zero_stage": zero_stage}
    given = {"kind": "rm", "model": scorer, "trainer": trainer, "samples": pairs, "pad": pad}
    ours = groups[ranks].run("export", **given, directory=str(tmp_path / "exported"))[0]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    rows = [ids for pair in pairs for ids, _ in pair]
    width = max(map(len, rows))
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([ids])).logits[0, 0].item() for ids in rows]
        for side in ("right", "left"):
            fill = [(pad,) * (width - len(ids)) for ids in rows]
            mask = [[0] * len(left) + [1] * len(ids) for left, ids in zip(fill, rows, strict=True)]
            inputs = [(*left, *ids) for left, ids in zip(fill, rows, strict=True)]
            if side == "right":
                mask = [row[::-1] for row in mask]
                inputs = [(*ids, *right) for right, ids in zip(fill, rows, strict=True)]
            theirs = model(input_ids=torch.tensor(inputs), attention_mask=torch.tensor(mask)).logits[:, 0]
            assert theirs.tolist() == pytest.approx(ours[side], abs=1e-5)
    assert np.std(alone) > 0.1  # scores that differ, or equality says nothing
    for way in ("alone", "right", "left"):
        assert ours[way] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_step_without_a_token_is_refused_on_every_rank(
    groups: Any, llama: str, exchanges: Any, zero_stage: int
) -> None:
    done = groups[2].run("all_masked", model=llama, zero_stage=zero_stage, samples=exchanges)
    message = "this optimizer step has nothing to average for nll: every row is masked"
    assert [one["message"] for one in done] == [message, message]
    # One rank without a token is no error: the step is the other rank's, and the loss is the same on both.
    assert done[0]["losses"] == done[1]["losses"]
    assert done[0]["finite"]


def test_nan_is_named_with_its_step_on_every_rank(groups: Any, llama: str, exchanges: Any) -> None:
    messages = groups[2].run("not_finite", model=llama, samples=exchanges)
    assert messages[0] == messages[1]
    assert messages[0].startswith("optimizer step 2: loss is nan, grad_norm is inf, nll is nan; lower the learning")


def test_metrics_of_a_rollout_are_weighted_by_what_they_count(groups: Any) -> None:
    several, none = groups[1].run("rl_programs:rollout_in_one")[0]
    # 12 of 100 tokens were clipped; the mean of 3/10 and 9/90 would be 0.2.
    assert several == pytest.approx({"loss": 1.5, "grad_norm": 3.0, "lr": 0.3, "clipped": 0.12})
    assert none == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 2 of 10 steps warm up: 1/2, 2/2; then 8 steps from 1 down to 0.1.
        (
            {"schedule": "linear", "warmup_ratio": 0.2, "min_lr_ratio": 0.1},
            [0.5, 1.0, 1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1],
        ),
        # cos(pi * k / 4) for k = 0..4 is 1, 0.7071, 0, -0.7071, -1.
        ({"schedule": "cosine", "warmup_ratio": 0.0, "min_lr_ratio": 0.0}, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ({"schedule": "constant", "warmup_ratio": 0.3, "min_lr_ratio": 0.1}, [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_learning_rate_factor(groups: Any, settings: dict[str, Any], expected: list[float]) -> None:
    factors = groups[1].run("lr_factors", settings=settings, total_steps=len(expected) - 1)[0]
    assert factors == pytest.approx(expected, abs=1e-6)


def test_ranks_on_loopback_listen_nowhere_else(groups: Any) -> None:
    addresses = groups[2].run("listening")
    assert addresses[0]  # the rendezvous store of rank 0
    assert {ip.removeprefix("::ffff:") for one in addresses for ip in one} == {"127.0.0.1"}
