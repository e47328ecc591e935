"""Rollouts kept in the store, so that they can be trained on again without a sampler.

    <store>/training/<stage>/<key>/rollouts/run.json                    what drew them: settings, input artifacts
    <store>/training/<stage>/<key>/rollouts/step-000040.safetensors     one rollout

A file holds arrays and, in its header, JSON: the step, the names of the sources, metrics of how the rollout came about,
and the SHA-256 of the arrays. Nothing in it is pickled. Texts are left out: tokens say the same. A step that is drawn
again after a restart replaces its file.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load, save

from rlhf_core.rollout.trajectory import Trajectory, VersionSpan
from rlhf_core.store.store import Store, StoreError

_FORMAT = 1
_RUN = "run.json"
_STEP = re.compile(r"step-(\d{6,})\.safetensors")
_MODEL_INPUT = "model_inputs/"


@dataclass(frozen=True)
class RolloutDump:
    """The rollouts of one run. `stage` and `key` as in the store."""

    store: Store
    stage: str
    key: str

    def start(self, about: Mapping[str, Any]) -> None:
        """about: JSON that says what the run is."""
        self.store.write_bytes(f"{self._path}/{_RUN}", json.dumps(about, indent=2).encode())

    def write(self, step: int, trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> None:
        self.store.write_bytes(self._file(step), packed(step, trajectories, metrics))

    def run(self) -> dict[str, Any]:
        """What `start` was given. Raises StoreError where no rollout was dumped."""
        try:
            return json.loads(self.store.read_bytes(f"{self._path}/{_RUN}"))
        except FileNotFoundError:
            raise StoreError(
                f"store {self.store.url} has no dumped rollouts of {self.stage} {self.key[:12]}; a new run keeps them, "
                f"one of another {self.stage}.seed, with {self.stage}.dump_rollouts=true from its first step on"
            ) from None

    def steps(self) -> list[int]:
        found = (_STEP.fullmatch(name) for name in self.store.list_names(self._path))
        return sorted(int(match[1]) for match in found if match)

    def read(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """(trajectories, metrics) as they were written. Raises StoreError for a file that is missing or damaged."""
        try:
            return unpacked(self.store.read_bytes(self._file(step)))
        except FileNotFoundError:
            have = ", ".join(map(str, self.steps())) or "none"
            raise StoreError(
                f"store {self.store.url} has no rollout of step {step} of {self.stage} {self.key[:12]}; it has {have}"
            ) from None
        except (SafetensorError, ValueError, KeyError) as error:
            raise StoreError(f"{self._file(step)} in store {self.store.url} is damaged: {error}") from error

    @property
    def _path(self) -> str:
        return f"training/{self.stage}/{self.key}/rollouts"

    def _file(self, step: int) -> str:
        return f"{self._path}/step-{step:06d}.safetensors"


def packed(step: int, trajectories: Sequence[Trajectory], metrics: Mapping[str, float]) -> bytes:
    """A rollout as the bytes of a safetensors file.

    Legend: B trajectories; P and R tokens of all prompts and responses together, one after the other; K steps of all
    solutions. prompt_ids (P,), response_ids, action_mask, sampler_logprobs (R,), step_scores, step_ends (K,), with
    *_lengths (B,); spans (S, 4): trajectory, version, start, stop; group, row, sample, truncated (B,); rewards, scores
    (B, sources), NaN where a source has none.
    """
    sources = {name: _names(getattr(one, name) for one in trajectories) for name in ("rewards", "scores")}
    spans = [(n, s.version, s.start, s.stop) for n, one in enumerate(trajectories) for s in one.version_spans]
    arrays: dict[str, np.ndarray] = {
        **{f"{name}_lengths": _integers([len(getattr(one, name)) for one in trajectories]) for name in _LENGTHS},
        **{
            name: np.concatenate([np.asarray(getattr(one, name), dtype) for one in trajectories])
            for name, dtype in _CONCATENATED.items()
        },
        "group": _integers([one.group_id for one in trajectories]),
        "row": _integers([one.prompt_id for one in trajectories]),
        "sample": _integers([one.sample_id for one in trajectories]),
        "truncated": np.array([one.finish_reason == "length" for one in trajectories]),
        "spans": _integers(spans).reshape(-1, 4),
        **{name: _table([getattr(one, name) for one in trajectories], sources[name]) for name in sources},
        **{
            f"{_MODEL_INPUT}{number}/{name}": value
            for number, one in enumerate(trajectories)
            for name, value in one.model_inputs.items()
        },
    }
    header = {"format": _FORMAT, "step": step, "sources": sources, "metrics": dict(metrics), "sha256": _digest(arrays)}
    return save(arrays, metadata={"rollout": json.dumps(header)})


def unpacked(content: bytes) -> tuple[list[Trajectory], dict[str, float]]:
    """(trajectories, metrics) of `packed`. Raises ValueError or SafetensorError for other content."""
    header, arrays = _header(content), load(content)
    if header["format"] != _FORMAT:
        raise ValueError(f"it has format {header['format']}, and this version reads {_FORMAT}")
    if _digest(arrays) != header["sha256"]:
        raise ValueError("its arrays do not have the SHA-256 that its header names")
    parts = {name: np.split(arrays[name], np.cumsum(arrays[f"{of}_lengths"])[:-1]) for name, of in _PARTS.items()}
    count = len(arrays["group"])
    spans, inputs = _spans(arrays["spans"], count), _model_inputs(arrays, count)
    trajectories = [
        Trajectory(
            prompt_ids=parts["prompt_ids"][number],
            response_ids=parts["response_ids"][number],
            action_mask=parts["action_mask"][number],
            sampler_logprobs=parts["sampler_logprobs"][number],
            version_spans=tuple(spans[number]),
            group_id=int(arrays["group"][number]),
            prompt_id=int(arrays["row"][number]),
            sample_id=int(arrays["sample"][number]),
            finish_reason="length" if arrays["truncated"][number] else "stop",
            rewards=_row(arrays["rewards"][number], header["sources"]["rewards"]),
            scores=_row(arrays["scores"][number], header["sources"]["scores"]),
            step_scores=tuple(parts["step_scores"][number].tolist()),
            step_ends=tuple(parts["step_ends"][number].tolist()),
            model_inputs=inputs[number],
        )
        for number in range(count)
    ]
    return trajectories, header["metrics"]


_LENGTHS = ("prompt_ids", "response_ids", "step_scores")
_CONCATENATED: dict[str, type] = {
    "prompt_ids": np.int64,
    "response_ids": np.int64,
    "action_mask": np.bool_,
    "sampler_logprobs": np.float32,
    "step_scores": np.float64,
    "step_ends": np.int64,
}
# Array -> the one whose lengths it has.
_PARTS = {
    "prompt_ids": "prompt_ids",
    "response_ids": "response_ids",
    "action_mask": "response_ids",
    "sampler_logprobs": "response_ids",
    "step_scores": "step_scores",
    "step_ends": "step_scores",
}


def _header(content: bytes) -> dict[str, Any]:
    """The JSON in the header of a safetensors file: 8 bytes of its length, then JSON with `__metadata__`."""
    deserialize(content)  # refuses what is no safetensors file
    size = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["rollout"])


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _names(tables: Any) -> list[str]:
    """In the order in which sources are summed up."""
    return list(dict.fromkeys(name for table in tables for name in table))


def _table(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> np.ndarray:
    values = [[row.get(name, np.nan) for name in names] for row in rows]
    return np.array(values, np.float64).reshape(len(rows), len(names))


def _row(values: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    return {name: value for name, value in zip(names, values.tolist(), strict=True) if not np.isnan(value)}


def _spans(table: np.ndarray, count: int) -> list[list[VersionSpan]]:
    """The (S, 4) spans of each of `count` trajectories, in one pass: a rollout has thousands of both."""
    spans: list[list[VersionSpan]] = [[] for _ in range(count)]
    for at, version, start, stop in table.tolist():
        spans[at].append(VersionSpan(version, start, stop))
    return spans


def _model_inputs(arrays: Mapping[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]]:
    """Those of each of `count` trajectories, in one pass."""
    inputs: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for path, value in arrays.items():
        if path.startswith(_MODEL_INPUT):
            number, _, name = path.removeprefix(_MODEL_INPUT).partition("/")
            inputs[int(number)][name] = value
    return inputs


def _integers(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
