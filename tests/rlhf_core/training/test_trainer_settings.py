"""Every setting of the trainer takes effect, and none of them changes the gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.config.base import SettingsError

pytestmark = pytest.mark.engines

RECOMPUTED = {"activation_checkpointing": True}
REENTRANT = {**RECOMPUTED, "activation_checkpointing_reentrant": True}
# What engine_programs.effects sees of a plain run.
PLAIN = {"forwards": 1, "reentrant": None, "offload": [False, "AdamW"], "overlap": False, "second copy": False}
EFFECTS = [
    ({"offload_optimizer": True, "zero_stage": 1}, {"offload": [True, "AdamW"]}),
    ({"offload_optimizer": True, "zero_stage": 2}, {"offload": [True, "AdamW"]}),
    ({"offload_optimizer": True, "zero_stage": 3}, {"offload": [True, "AdamW"]}),
    ({"overlap_comm": True, "zero_stage": 2}, {"overlap": True}),
    ({"overlap_comm": True, "zero_stage": 3}, {"overlap": True}),
    ({"zpg": 2, "zero_stage": 3}, {"second copy": True}),
    ({**RECOMPUTED, "zero_stage": 2}, {"forwards": 2, "reentrant": False}),
    ({**RECOMPUTED, "zero_stage": 3}, {"forwards": 2, "reentrant": False}),
    ({**REENTRANT, "zero_stage": 2}, {"forwards": 2, "reentrant": True}),
    ({**REENTRANT, "zero_stage": 3}, {"forwards": 2, "reentrant": True}),
    ({**RECOMPUTED, "sequence_parallel": 2, "zero_stage": 2}, {"forwards": 2, "reentrant": False}),
]


@pytest.fixture(scope="module")
def plain_gradients(groups: Any, llama: str, exchanges: Any) -> dict[str, np.ndarray]:
    """Of one rank that does everything at once."""
    return gradients(groups[1], llama, exchanges, {"micro_batch_size": 8, "zero_stage": 2})


def gradients(group: Any, model: str, samples: Any, trainer: dict[str, Any], **given: Any) -> dict[str, np.ndarray]:
    return group.run("gradient", kind="sft", model=model, samples=samples, trainer=trainer, **given)[0]["gradients"]


def difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Relative L2."""
    assert found.keys() == wanted.keys()
    squares = sum(((found[name] - array) ** 2).sum() for name, array in wanted.items())
    return float(np.sqrt(squares / sum((array**2).sum() for array in wanted.values())))


@pytest.mark.parametrize(("trainer", "effect"), EFFECTS)
def test_setting_takes_effect_and_leaves_the_gradient(
    groups: Any,
    llama: str,
    exchanges: Any,
    plain_gradients: dict[str, np.ndarray],
    trainer: dict[str, Any],
    effect: dict[str, Any],
) -> None:
    trainer = {"ranks": 2, "micro_batch_size": 2, **trainer}
    found = groups[2].run("effects", model=llama, samples=exchanges, trainer=trainer)[0]
    assert found == {**PLAIN, **effect, "gradients": "torch.float32"}
    assert difference(gradients(groups[2], llama, exchanges, trainer), plain_gradients) < 1e-5


def test_plain_run_has_none_of_these_effects(groups: Any, llama: str, exchanges: Any) -> None:
    found = groups[2].run("effects", model=llama, samples=exchanges, trainer={"ranks": 2})[0]
    assert found == {**PLAIN, "gradients": "torch.float32"}


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_gradients_of_bfloat16_models_add_up_in_the_dtype_given(
    groups: Any, llama: str, exchanges: Any, plain_gradients: dict[str, np.ndarray], zero_stage: int
) -> None:
    """Eight micro-batches: rounding after each shows."""
    errors = {}
    for dtype in (None, "float32", "bfloat16"):
        trainer = {"micro_batch_size": 1, "zero_stage": zero_stage, "grad_accum_dtype": dtype}
        found = groups[1].run("effects", model=llama, samples=exchanges, trainer=trainer, dtype="bfloat16")[0]
        assert found["gradients"] == f"torch.{dtype or 'float32'}"
        errors[dtype] = difference(gradients(groups[1], llama, exchanges, trainer, dtype="bfloat16"), plain_gradients)
    assert errors[None] == errors["float32"] < errors["bfloat16"]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("trainer", [{}, REENTRANT])
def test_frozen_parameters_stay_to_the_bit(
    groups: Any, llama: str, exchanges: Any, zero_stage: int, trainer: dict[str, Any]
) -> None:
    given = {"ranks": 2, "micro_batch_size": 2, "zero_stage": zero_stage, **trainer}
    done = groups[2].run(
        "train",
        kind="sft",
        model=llama,
        samples=exchanges,
        trainer=given,
        optimizer={"lr": 0.1, "weight_decay": 0.1, "warmup_ratio": 0.0},
        steps=2,
        frozen=[r"^model\.embed_tokens", r"layers\.0\..*proj"],
    )[0]
    before = dict(AutoModelForCausalLM.from_pretrained(llama).named_parameters())
    frozen = [name for name in before if "embed_tokens" in name or ("layers.0." in name and "proj" in name)]
    assert len(frozen) == 8
    for name, start in before.items():
        same = torch.equal(torch.from_numpy(done["parameters"][name]), start)
        assert same == (name in frozen), name


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embd_tokens"], r"freeze: 'embd_tokens' finds no parameter; there are e.g. model.embed_tokens.weight, "),
        (["("], r"freeze: '\(' is no regular expression \("),
        ([""], r"freeze: \[''\] leaves nothing to train; freeze less"),
    ],
)
def test_what_cannot_be_frozen_is_refused(llama: str, patterns: list[str], message: str) -> None:
    from rlhf_core.models.policy import load_policy
    from rlhf_core.training.parameters import freeze

    with pytest.raises(SettingsError, match=message):
        freeze(load_policy(llama, dtype=torch.float32, attention="sdpa"), patterns)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_moving_average(groups: Any, llama: str, exchanges: Any, tmp_path: Any, zero_stage: int) -> None:
    """average <- 0.75 average + 0.25 weights after each of three steps, in NumPy; training does not see it."""
    trainer = {"ranks": 2, "micro_batch_size": 2, "zero_stage": zero_stage}
    done = groups[2].run(
        "average", model=llama, samples=exchanges, trainer=trainer, decay=0.75, steps=3, directory=str(tmp_path / "hf")
    )[0]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, parameter in exported.named_parameters():
        average = done["weights"][0][name].astype(np.float64)
        for weights in done["weights"][1:]:
            average = 0.75 * average + 0.25 * weights[name]
        assert np.abs(done["average"][name] - average).max() < 1e-6, name
        assert np.abs(parameter.detach().numpy() - average).max() < 1e-6, name
        assert np.abs(done["weights"][-1][name] - average).max() > 1e-4, name
    assert done["digests"] == done["digests without"]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_moving_average_of_a_bfloat16_model_is_of_its_float32_weights(
    groups: Any, llama: str, exchanges: Any, tmp_path: Any, zero_stage: int
) -> None:
    """Steps of 1e-5 do not move a weight of 1 in bfloat16; its average moves by a part of them."""
    trainer = {"ranks": 2, "micro_batch_size": 2, "zero_stage": zero_stage}
    given: dict[str, Any] = {"decay": 0.5, "steps": 1, "directory": str(tmp_path / "hf"), "dtype": "bfloat16"}
    done = groups[2].run("average", model=llama, samples=exchanges, trainer=trainer, lr=1e-5, **given)[0]
    name = "model.norm.weight"
    assert (done["weights"][-1][name] == 1).all()
    moved = np.abs(done["fp32 average"][name] - 1)
    assert (np.abs(moved - 5e-6) < 1e-7).mean() > 0.9  # AdamW's first step is lr, for all but tiny gradients


def test_average_without_one_in_the_checkpoint_is_named(groups: Any, llama: str, exchanges: Any, tmp_path: Any) -> None:
    given = {"model": llama, "dtype": "float32", "samples": exchanges, "optimizer": {"lr": 1e-3}, "trainer": {}}
    groups[1].run("save_and_go_on", **given, directory=str(tmp_path))
    loaded = str(tmp_path / "checkpoint" / "model")
    with pytest.raises(RuntimeError, match=r"has no moving average of lm_head.weight, .*; was ema_decay set\?"):
        groups[1].run("save_and_go_on", **given, directory=str(tmp_path), load_from=loaded, ema_decay=0.5)
