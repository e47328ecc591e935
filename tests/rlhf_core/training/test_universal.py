"""Ranks of another number or ZeRO stage go on from a training checkpoint through DeepSpeed's universal form of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.training.universal import ConversionError, convert_all

pytestmark = pytest.mark.engines

ADAM = {"lr": 5e-3, "weight_decay": 0.1, "warmup_ratio": 0.2, "schedule": "cosine"}
LAYOUTS = [  # (ranks, ZeRO stage) that wrote it, and that load it
    ((2, 2), (2, 2), "float32"),
    ((2, 2), (1, 1), "float32"),
    ((1, 1), (2, 2), "bfloat16"),
    ((1, 3), (2, 3), "float32"),
    ((2, 3), (2, 3), "bfloat16"),
]


def trained_then_loaded(
    groups: Any,
    model: str,
    samples: Any,
    directory: Path,
    wrote: Any,
    loads: Any,
    *,
    convert: bool = True,
    **given: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Who went straight on after saving, and who loaded it; both made the same four steps in all."""
    layouts = [{"ranks": ranks, "zero_stage": stage, "micro_batch_size": 2} for ranks, stage in (wrote, loads)]
    given = {
        "model": model,
        "samples": samples,
        "optimizer": ADAM,
        "directory": str(directory),
        "ema_decay": 0.5,
        **given,
    }
    straight = groups[wrote[0]].run("save_and_go_on", trainer=layouts[0], **given)[0]
    if convert:
        convert_all(directory / "checkpoint")
    loaded = str(directory / "checkpoint" / "model")
    return straight, groups[loads[0]].run("save_and_go_on", trainer=layouts[1], load_from=loaded, **given)[0]


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.abs(found[name] - array).max() <= tolerance, name


@pytest.mark.parametrize(("wrote", "loads", "dtype"), LAYOUTS)
def test_ranks_of_another_number_go_on(
    groups: Any, llama: str, exchanges: Any, tmp_path: Path, wrote: Any, loads: Any, dtype: str
) -> None:
    straight, resumed = trained_then_loaded(groups, llama, exchanges, tmp_path, wrote, loads, dtype=dtype)
    assert_same(resumed["loaded"], straight["loaded"], 0)
    assert_same(resumed["averages"], straight["averages"], 0)
    assert resumed["lrs"] == straight["lrs"]
    if wrote == loads:
        assert_same(resumed["parameters"], straight["parameters"], 0)
        assert resumed["losses"] == straight["losses"]
    elif dtype == "float32":  # gradients are summed in another order
        assert_same(resumed["parameters"], straight["parameters"], 1e-5)
        assert resumed["losses"] == pytest.approx(straight["losses"], rel=1e-5)
    else:
        assert resumed["losses"] == pytest.approx(straight["losses"], rel=2e-2)


def test_without_zero_any_number_of_ranks_goes_on(groups: Any, llama: str, exchanges: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"dtype": "float32", "convert": False}
    straight, resumed = trained_then_loaded(groups, llama, exchanges, tmp_path, (2, 0), (1, 0), **given)
    assert_same(resumed["averages"], straight["averages"], 0)
    assert_same(resumed["parameters"], straight["parameters"], 1e-5)


def test_frozen_parameters_come_through(groups: Any, llama: str, exchanges: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"dtype": "float32", "frozen": ["embed_tokens", "layers.0"]}
    straight, resumed = trained_then_loaded(groups, llama, exchanges, tmp_path, (2, 2), (1, 2), **given)
    assert_same(resumed["parameters"], straight["parameters"], 1e-5)


@pytest.mark.parametrize(("wrote", "loads"), [((2, 2), (1, 2)), ((1, 3), (2, 3))])
def test_adapters_come_through(groups: Any, llama: str, exchanges: Any, tmp_path: Path, wrote: Any, loads: Any) -> None:
    """Of a model whose other weights are frozen."""
    given: dict[str, Any] = {"dtype": "float32", "lora": True}
    straight, resumed = trained_then_loaded(groups, llama, exchanges, tmp_path, wrote, loads, **given)
    assert_same(resumed["loaded"], straight["loaded"], 0)
    assert_same(resumed["averages"], straight["averages"], 0)
    assert_same(resumed["parameters"], straight["parameters"], 1e-5)
    assert resumed["losses"] == pytest.approx(straight["losses"], rel=1e-5)


def test_the_path_of_a_checkpoint_is_no_pattern(groups: Any, llama: str, exchanges: Any, tmp_path: Path) -> None:
    """Neither of a file name nor of a regular expression."""
    directory = tmp_path / "a[1]+(b)*?"
    directory.mkdir()
    given: dict[str, Any] = {"dtype": "float32"}
    straight, resumed = trained_then_loaded(groups, llama, exchanges, directory, (2, 2), (1, 2), **given)
    assert_same(resumed["loaded"], straight["loaded"], 0)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "model" / "engine").mkdir(parents=True)
    with pytest.raises(ConversionError, match=r"model/engine: DeepSpeed's conversion ended with 1: .*Error"):
        convert_all(tmp_path)
