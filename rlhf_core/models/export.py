"""Adapters on disk, and merging one into the model it was trained on.

A trained model's directory holds the whole, merged model in Hugging Face layout and, below it:

- adapter/adapter_model.safetensors, adapter_config.json: the adapter, as peft writes it;
- adapter/config.json: the model's configuration, with its labels and what its scores mean;
- adapter/base.json: {"digest", "path"} of the directory with the frozen weights. The digest is that of
  `directory_digest` (rlhf_core/store/keys.py).
"""

import copy
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from rlhf_core.config.base import SettingsError
from rlhf_core.models.lora import ADAPTER, PEFT_PREFIX, adapter_state, lora_config, merged_state
from rlhf_core.models.process_scorer import PROCESS_REWARD
from rlhf_core.models.scorer import Scorer

ADAPTER_DIRECTORY = "adapter"
_WEIGHTS, _CONFIG, _BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
_AUTO: dict[str, Any] = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
# Relative L2 error on the probe, computed in float32: order of summation, and weights that were rounded to 16 bits.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@dataclass(frozen=True)
class Merged:
    """What `merge_adapter` wrote. difference: relative L2 error of its outputs against base and adapter in peft."""

    kind: Literal["causal", "reward", "process"]
    difference: float


def write_adapter(directory: Path, lm: PreTrainedModel, adapter: dict[str, Tensor], base_digest: str) -> None:
    """The adapter in peft's layout, with the configuration of its model and the base that it belongs to.

    adapter: as `adapter_state` gives it. base_digest: of the directory that `lm` was loaded from.
    """
    config = copy.copy(lora_config(lm))
    if config is None:
        raise ValueError(f"this {type(lm).__name__} has no adapter to write; see add_lora")
    config.base_model_name_or_path = lm.name_or_path
    config.target_modules = sorted(config.target_modules or [])  # a set would be written in another order each time
    config.inference_mode = True
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in adapter.items()}, directory / _WEIGHTS, {"format": "pt"})
    config.save_pretrained(str(directory))
    lm.config.save_pretrained(directory)
    (directory / _BASE).write_text(json.dumps({"digest": base_digest, "path": lm.name_or_path}, indent=2))


# -- merging ----------------------------------------------------------------------------------------------------------


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    base_digest: str | None,
    dtype: torch.dtype | None = None,
) -> Merged:
    """Writes base and adapter as one model in Hugging Face layout, with tokenizer and chat template, or nothing.

    Before the directory appears, it is loaded by transformers and its outputs on a probe are compared with those of
    base and adapter in peft.

    Args:
        out: a directory that does not exist, or is empty.
        base_digest: of `base`, which has to be the one that the adapter was trained on; None: whatever it is.
        dtype: of the merged weights; None for that of training where the adapter tells it, else the base's.

    Raises SettingsError for directories that are not what they should be, or do not belong together.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    if not (base / "config.json").is_file():
        raise SettingsError(f"base {base} holds no config.json; give a model's directory")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"out {out} is not empty; give a new or an empty directory")
    task = _task(adapter)
    if base_digest is not None:
        _check_base(base, base_digest, adapter)
    lm = _with_adapter(base, adapter, task, dtype)
    allowed = _TOLERANCE[lm.dtype]
    named = ((name, parameter.detach()) for name, parameter in lm.named_parameters())
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        lm.save_pretrained(temporary, state_dict=dict(merged_state(lm, named)))
        _copy_tokenizer(adapter, base, temporary)
        difference = _difference(lm.float(), task, temporary)
        if not difference <= allowed:
            raise SettingsError(
                f"the merged model's outputs differ from those of {base} with {adapter} by {difference:.1e} (relative "
                f"L2; allowed is {allowed:.0e}), so nothing was written; merge in float32 to see whether "
                f"rounding does it"
            )
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Merged(_kind(lm), difference)


def _task(adapter: Path) -> str:
    """The adapter's task in peft's words. Raises SettingsError for a directory without a LoRA adapter."""
    missing = [name for name in (_CONFIG, _WEIGHTS) if not (adapter / name).is_file()]
    if missing:
        raise SettingsError(f"adapter {adapter} holds no {' and no '.join(missing)}; give an adapter's directory")
    values = json.loads((adapter / _CONFIG).read_text())
    kind, task = values.get("peft_type"), values.get("task_type")
    if kind != "LORA" or task not in _AUTO:
        raise SettingsError(
            f"adapter {adapter} has peft_type {kind} and task_type {task}; what is merged is LORA of "
            f"{' or '.join(_AUTO)}"
        )
    return task


def _check_base(base: Path, digest: str, adapter: Path) -> None:
    recorded = adapter / _BASE
    if not recorded.is_file():
        raise SettingsError(f"adapter {adapter} has no {_BASE} that names its base; if {base} is it, give --any-base")
    trained_on = json.loads(recorded.read_text())
    if digest != trained_on["digest"]:
        raise SettingsError(
            f"base {base} has the content digest {digest[:12]}, and the adapter was trained on "
            f"{trained_on['digest'][:12]} ({trained_on['path']}); give that directory, or --any-base to merge anyway"
        )


def _with_adapter(base: Path, adapter: Path, task: str, dtype: torch.dtype | None) -> PreTrainedModel:
    """Base with the adapter in it; every tensor of the adapter's file has its place and every place its tensor."""
    with safe_open(adapter / _WEIGHTS, framework="pt") as file:
        given = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    config = _model_config(base, adapter, task, given)
    try:
        lm = _AUTO[task].from_pretrained(base, config=config, dtype=dtype or "auto", trust_remote_code=False)
        PeftModel.from_pretrained(lm, str(adapter), adapter_name=ADAPTER, autocast_adapter_dtype=False)
    except (RuntimeError, ValueError) as error:  # of other shapes, or without such layers
        raise SettingsError(f"adapter {adapter} does not fit base {base}: {error}") from error
    wanted = {name: list(tensor.shape) for name, tensor in adapter_state(lm.named_parameters()).items()}
    odd = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if odd:
        raise SettingsError(f"adapter {adapter} does not fit base {base}: {len(odd)} tensors differ, such as {odd[0]}")
    return lm.eval()


def _model_config(base: Path, adapter: Path, task: str, given: dict[str, list[int]]) -> Any:
    """That of the trained model where the adapter has it, else the base's with as many labels as the head has rows."""
    if (adapter / "config.json").is_file():
        return AutoConfig.from_pretrained(adapter, trust_remote_code=False)
    labels = {}
    if task == "SEQ_CLS":
        head = given.get(f"{PEFT_PREFIX}score.weight")
        if head is None:
            raise SettingsError(f"adapter {adapter} is for a reward model but holds no head `score`; train it again")
        labels = {"num_labels": head[0]}
    return AutoConfig.from_pretrained(base, trust_remote_code=False, **labels)


def _difference(lm: PreTrainedModel, task: str, directory: Path) -> float:
    """Relative L2 error, on tokens drawn from the whole vocabulary, of the model in `directory` against `lm`."""
    vocabulary = lm.config.get_text_config().vocab_size
    probe = torch.randint(vocabulary, (4, 16), generator=torch.Generator().manual_seed(0))
    merged = _AUTO[task].from_pretrained(directory, dtype=lm.dtype, trust_remote_code=False, use_safetensors=True)
    expected, given = _outputs(lm, task, probe), _outputs(merged.eval(), task, probe)
    return float((given - expected).norm() / expected.norm())


@torch.no_grad()
def _outputs(lm: PreTrainedModel, task: str, probe: Tensor) -> Tensor:
    """Logits of all tokens, or scores at all of them."""
    if task == "CAUSAL_LM":
        return lm(input_ids=probe, use_cache=False).logits
    scores: Any = Scorer(lm)(probe, position_ids=torch.arange(probe.shape[1]).expand_as(probe))
    return scores


def _copy_tokenizer(adapter: Path, base: Path, out: Path) -> None:
    """The adapter's where training saved one beside it, since its chat template may be another than the base's."""
    for source in (adapter, base):
        if (source / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(out)
            return


def _kind(lm: PreTrainedModel) -> Literal["causal", "reward", "process"]:
    if lm.get_output_embeddings() is None:
        return "reward"
    return "process" if PROCESS_REWARD in lm.config.to_dict() else "causal"
