"""Adapters on disk, and merging one into the model it was trained on.

A trained model's directory holds the whole, merged model in Hugging Face layout and, below it:

- adapter/adapter_model.safetensors, adapter_config.json: the adapter, as peft writes it;
- adapter/config.json: the model's configuration, with its labels and what its scores mean;
- adapter/generation_config.json, of a policy: its defaults of generation, with the tokens to stop at;
- adapter/base.json: {"digest", "path"} of the directory with the frozen weights. The digest is that of
  `directory_digest` (rlhf_core/store/keys.py), the path what the user knows it by (`BaseName`).
"""

import copy
import json
import os
import shutil
import uuid
from collections.abc import Iterator
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
from transformers.utils import logging

from rlhf_core.config.base import SettingsError
from rlhf_core.config.training import Dtype
from rlhf_core.models.lora import ADAPTER, PEFT_PREFIX, adapter_state, lora_config, merged_state
from rlhf_core.models.policy import mend_generation
from rlhf_core.models.process_scorer import PROCESS_REWARD
from rlhf_core.models.scorer import Scorer
from rlhf_core.models.tokenizer import GENERATION, stop_token_ids, write_stop_token_ids

ADAPTER_DIRECTORY = "adapter"
_WEIGHTS, _CONFIG, _BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
_AUTO: dict[str, Any] = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
_TOLERANCE = 1e-4  # relative L2 error on the probe of weights merged in float32: the order of summation alone


@dataclass(frozen=True)
class BaseName:
    """What the frozen weights of an adapter are called where they can be had again.

    name: a directory, a model of the hub, or stage/key of an artifact. revision: its commit on the hub.
    """

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


@dataclass(frozen=True)
class Merged:
    """What `merge_adapter` wrote. difference: relative L2 error of its outputs against base and adapter in peft, which
    in 16 bits is what rounding the merged weights costs."""

    kind: Literal["causal", "reward", "process"]
    difference: float


def is_quantised(lm: PreTrainedModel) -> bool:
    """Whether its frozen weights are stored in 4 bits, where no adapter can be merged into them."""
    return "quantization_config" in lm.config.to_dict()


def export_model(
    lm: PreTrainedModel,
    directory: Path,
    state: dict[str, Tensor],
    adapter: dict[str, Tensor],
    base_digest: str | None,
    base_name: BaseName | None = None,
) -> None:
    """Writes the whole model and, if it has one, its adapter beside it.

    Args:
        state: (Hugging Face name, whole tensor) of all weights, adapters merged. Not read of a quantised model, whose
            adapter is merged into the base as it is on disk.
        adapter, base_digest, base_name: as for `write_adapter`; base_digest is None for a model without an adapter.
    """
    if not is_quantised(lm):
        lm.save_pretrained(directory, state_dict=state)
    if base_digest is None:
        return
    written = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    write_adapter(written, lm, adapter, base_digest, base_name)
    if is_quantised(lm):
        merge_adapter(str(lm.name_or_path), written, directory, base_digest=None)
    os.replace(written, directory / ADAPTER_DIRECTORY)


def write_adapter(
    directory: Path,
    lm: PreTrainedModel,
    adapter: dict[str, Tensor],
    base_digest: str,
    base_name: BaseName | None = None,
) -> None:
    """The adapter in peft's layout, with the configuration of its model and the base that it belongs to.

    adapter: as `adapter_state` gives it. base_digest: of the directory that `lm` was loaded from. base_name: what that
    is called; None: by its path.
    """
    config = copy.copy(lora_config(lm))
    if config is None:
        raise ValueError(f"this {type(lm).__name__} has no adapter to write; see add_lora")
    base_name = base_name or BaseName(str(lm.name_or_path))
    config.base_model_name_or_path = base_name.name
    if base_name.revision is not None:
        config.revision = base_name.revision
    # Sets would be written in another order each time.
    config.target_modules = sorted(config.target_modules or [])
    config.target_parameters = sorted(config.target_parameters or [])
    config.inference_mode = True
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in adapter.items()}, directory / _WEIGHTS, {"format": "pt"})
    config.save_pretrained(str(directory))
    model_config = copy.deepcopy(lm.config)
    model_config.__dict__.pop("quantization_config", None)  # of these weights, not of what is merged from them
    model_config.save_pretrained(directory)
    (directory / _BASE).write_text(json.dumps({"digest": base_digest, "path": str(base_name)}, indent=2))


def silence_transformers() -> None:
    """For a command: no progress bars, and no report that a head is new which the adapter brings."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# -- merging ----------------------------------------------------------------------------------------------------------


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    base_digest: str | None,
    dtype: Dtype | None = None,
) -> Merged:
    """Writes base and adapter as one model in Hugging Face layout, with tokenizer, chat template and the defaults of
    generation that belong to them, or nothing.

    Before the directory appears, transformers loads it. The merged weights must give, in float32, what base and adapter
    give in peft, and what was loaded must be these weights, rounded.

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
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        lm.save_pretrained(temporary, state_dict=dict(merged_state(lm, _named(lm))))
        tokenizer = _copy_tokenizer(adapter, base, temporary)
        if _kind(lm) == "causal":
            _write_generation(adapter, base, temporary, tokenizer)
        difference = _checked(lm, task, temporary)
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


def _with_adapter(base: Path, adapter: Path, task: str, dtype: Dtype | None) -> PreTrainedModel:
    """Base with the adapter in it; every tensor of the adapter's file has its place and every place its tensor."""
    with safe_open(adapter / _WEIGHTS, framework="pt") as file:
        given = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    config = _model_config(base, adapter, task, given)
    try:
        lm = _AUTO[task].from_pretrained(base, config=config, dtype=dtype or "auto", trust_remote_code=False)
        if task == "CAUSAL_LM":
            mend_generation(lm)
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


@torch.no_grad()
def _checked(lm: PreTrainedModel, task: str, directory: Path) -> float:
    """`Merged.difference` of the model in `directory`. Raises SettingsError unless it is `lm`, merged and rounded.

    Both models are in float32 afterwards, `lm` with its adapter as before.
    """
    merged = _AUTO[task].from_pretrained(directory, dtype="auto", trust_remote_code=False, use_safetensors=True).eval()
    vocabulary = lm.config.get_text_config().vocab_size
    probe = torch.randint(vocabulary, (4, 16), generator=torch.Generator().manual_seed(0))
    expected = _outputs(lm.float(), task, probe)
    written = {name: parameter.dtype for name, parameter in merged.named_parameters()}
    difference = _error(_outputs(merged.float(), task, probe), expected)
    parameters = dict(merged.named_parameters())
    for name, tensor in merged_state(lm, _named(lm)):
        if not torch.equal(parameters[name], tensor.to(written[name]).float()):
            raise SettingsError(f"{name} of the merged model was not read back as it was written; nothing was kept")
        parameters[name].copy_(tensor)
    exact = _error(_outputs(merged, task, probe), expected)
    if not exact <= _TOLERANCE:
        raise SettingsError(
            f"the merged model's outputs differ by {exact:.1e} (relative L2; allowed is {_TOLERANCE:.0e}) from those "
            f"of base and adapter in peft, so nothing was kept; this model's layers are not what merging takes them for"
        )
    return difference


def _named(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach()) for name, parameter in lm.named_parameters())


def _error(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


def _outputs(lm: PreTrainedModel, task: str, probe: Tensor) -> Tensor:
    """Logits of all tokens, or scores at all of them."""
    if task == "CAUSAL_LM":
        return lm(input_ids=probe, use_cache=False).logits
    scores: Any = Scorer(lm)(probe, position_ids=torch.arange(probe.shape[1]).expand_as(probe))
    return scores


def _copy_tokenizer(adapter: Path, base: Path, out: Path) -> Any:
    """The adapter's where training saved one beside it, since its chat template may be another than the base's; None
    where neither has one."""
    for source in (adapter, base):
        if (source / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            tokenizer.save_pretrained(out)
            return tokenizer
    return None


def _write_generation(adapter: Path, base: Path, out: Path, tokenizer: Any) -> None:
    """The adapter's where training wrote one beside it, which stops at what its responses ended with; else the base's,
    which transformers has written, with the tokenizer's EOS to stop at as well."""
    if (adapter / GENERATION).is_file():
        shutil.copy(adapter / GENERATION, out / GENERATION)
    elif tokenizer is not None:
        write_stop_token_ids(out, stop_token_ids(base, tokenizer))


def _kind(lm: PreTrainedModel) -> Literal["causal", "reward", "process"]:
    if lm.get_output_embeddings() is None:
        return "reward"
    return "process" if PROCESS_REWARD in lm.config.to_dict() else "causal"
