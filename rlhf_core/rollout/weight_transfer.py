"""Weights from the trainer to the sampler through a directory in shared memory.

A transfer is one directory: safetensors files ("buckets") and `index.json`, which is written last and names them:

    {"version": 3, "buckets": [{"file": "bucket-00000.safetensors", "sha256": "...", "names": [...]}], "names": [...]}

The trainer writes it with `TransferWriter`. The receiver calls `read_transfer`, which checks the whole set before
anything touches the engine: vLLM itself accepts half of a model without a word. This module serves the trainer too, so
vLLM is not imported here; `register` is the entry point by which vLLM finds the receiving engine (shm_engine.py).
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save

from rlhf_core.cluster.leftovers import directory_prefix

BACKEND = "rlhf_shm"
INDEX = "index.json"
BUCKET_BYTES = 512 * 2**20
TIED_HEAD = "lm_head.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHOWN_NAMES = 5


class WeightTransferError(Exception):
    """A transfer that is not whole or does not fit the model. The engine keeps its weights and version."""


@dataclass(frozen=True)
class Bucket:
    file: str
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class TransferIndex:
    """What `index.json` says, and where it lies."""

    path: Path
    version: int
    buckets: tuple[Bucket, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for bucket in self.buckets for name in bucket.names)

    @property
    def checksum(self) -> str:
        """SHA-256 over the buckets' SHA-256 digests, in order."""
        return hashlib.sha256("".join(bucket.sha256 for bucket in self.buckets).encode()).hexdigest()


@dataclass(frozen=True)
class ModelSpec:
    """What a transfer has to hold: a model's tensors under its checkpoint's own names.

    dtype: what the sampler runs in. tied_head: `lm_head.weight` is the input embedding, so a transfer may leave it out.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    tied_head: bool


@dataclass(frozen=True)
class Transfer:
    """A transfer that was read and found whole: `received` is its size in bytes."""

    index: TransferIndex
    received: int


class TransferWriter:
    """Writes one transfer, tensor by tensor, so that a sharded trainer need never hold more than a bucket.

    A bucket is written once it holds at least `bucket_bytes`. Nothing is readable as a transfer before `finish`.
    """

    def __init__(self, directory: str | os.PathLike[str], version: int, bucket_bytes: int) -> None:
        if version < 0 or bucket_bytes <= 0:
            raise ValueError(f"version {version} must be 0 or more and bucket_bytes {bucket_bytes} more than 0")
        self._directory = Path(directory)
        self._version = version
        self._bucket_bytes = bucket_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._names: set[str] = set()
        self._buckets: list[Bucket] = []
        self._directory.mkdir(parents=True, exist_ok=True)
        if any(self._directory.iterdir()):
            raise WeightTransferError(f"{self._directory} is not empty; give each transfer a directory of its own")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one whole tensor under its name in the checkpoint. It is copied, so the caller may change it after."""
        if name in self._names:
            raise WeightTransferError(f"tensor {name} was added twice to version {self._version}")
        self._names.add(name)
        copied = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pending[name] = copied
        self._pending_bytes += copied.numel() * copied.element_size()
        if self._pending_bytes >= self._bucket_bytes:
            self._write_bucket()

    def finish(self) -> TransferIndex:
        """Writes the last bucket, then the index."""
        if self._pending:
            self._write_bucket()
        index = TransferIndex(self._directory / INDEX, self._version, tuple(self._buckets))
        content = {
            "version": index.version,
            "buckets": [{"file": b.file, "sha256": b.sha256, "names": list(b.names)} for b in index.buckets],
            "names": list(index.names),
        }
        partial = self._directory / f"{INDEX}.partial"
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(index.path)
        return index

    def _write_bucket(self) -> None:
        file = f"bucket-{len(self._buckets):05d}.safetensors"
        content = save(self._pending)
        (self._directory / file).write_bytes(content)
        self._buckets.append(Bucket(file, hashlib.sha256(content).hexdigest(), tuple(self._pending)))
        self._pending = {}
        self._pending_bytes = 0


@contextmanager
def transfer_directory(fallback: str | os.PathLike[str]) -> Iterator[Path]:
    """A new directory for one transfer, in shared memory where there is any, else below `fallback`; gone afterwards."""
    shared = Path("/dev/shm")
    parent = shared if shared.is_dir() else fallback
    with tempfile.TemporaryDirectory(prefix=directory_prefix("weights"), dir=parent) as directory:
        yield Path(directory)


def write_model(model_dir: str | os.PathLike[str], directory: Path, version: int, dtype: torch.dtype) -> TransferIndex:
    """A transfer of the weights of a Hugging Face directory, in `dtype`."""
    writer = TransferWriter(directory, version, BUCKET_BYTES)
    for file in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                writer.add(name, tensors.get_tensor(name).to(dtype))
    return writer.finish()


def read_model_spec(model_dir: str | os.PathLike[str], dtype: torch.dtype) -> ModelSpec:
    """The tensors of a Hugging Face directory, from the headers of its safetensors files.

    Raises WeightTransferError if it has no config.json or no safetensors file.
    """
    from transformers import AutoConfig

    directory = Path(model_dir)
    if not (directory / "config.json").is_file():
        raise WeightTransferError(f"{directory} holds no config.json; give a Hugging Face model directory")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    if not shapes:
        raise WeightTransferError(f"{directory} holds no weights (*.safetensors); give a directory that does")
    # Through AutoConfig: config.json leaves out what equals the family's default.
    tied_head = bool(AutoConfig.from_pretrained(directory).get_text_config().tie_word_embeddings)
    if tied_head and TIED_HEAD in shapes and not _head_is_tied(sorted(directory.glob("*.safetensors"))):
        # vLLM would take such a head as it is, and a transfer without one would leave it as it was.
        raise WeightTransferError(
            f"{directory}: config.json ties the head, but {TIED_HEAD} equals no other tensor; set tie_word_embeddings "
            "to false or remove the tensor"
        )
    return ModelSpec(shapes, dtype, tied_head)


def read_index(path: str | os.PathLike[str]) -> TransferIndex:
    """Reads `index.json`. Raises WeightTransferError if it is missing or is not an index."""
    index_path = Path(path)
    try:
        content = json.loads(index_path.read_text(encoding="utf-8"))
        buckets = tuple(Bucket(b["file"], b["sha256"], tuple(b["names"])) for b in content["buckets"])
        index = TransferIndex(index_path, int(content["version"]), buckets)
        names = tuple(content["names"])
    except FileNotFoundError:
        raise WeightTransferError(f"no transfer at {index_path}: the index is written last, by finish()") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WeightTransferError(f"{index_path} is not the index of a transfer: {error!r}") from error
    if names != index.names:
        raise WeightTransferError(f"{index_path}: buckets against names: {_difference(index.names, names)}")
    return index


def read_transfer(index: TransferIndex, model: ModelSpec) -> Transfer:
    """Reads every byte of a transfer and checks it against `model`, one bucket in memory at a time.

    All buckets are there and hash to their SHA-256, the names are exactly the model's, shapes and dtypes fit, and a
    tied head equals the embedding. Raises WeightTransferError that names what is missing or wrong.
    """
    where = f"transfer of version {index.version} in {index.path.parent}"
    seen: set[str] = set()
    received = 0
    for bucket in index.buckets:
        content = _read_bucket(index.path.parent / bucket.file, bucket, where)
        received += len(content)
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise WeightTransferError(f"{where}: {bucket.file} is not a safetensors file: {error}") from error
        if set(tensors) != set(bucket.names):
            raise WeightTransferError(f"{where}: {bucket.file}: {_difference(tensors, bucket.names)}")
        if twice := seen & tensors.keys():
            raise WeightTransferError(f"{where}: sent twice: {_listed(twice)}")
        seen.update(tensors)
        _check_tensors(tensors, model, where)
    expected = set(model.shapes)
    if model.tied_head:
        expected = expected - {TIED_HEAD} | (seen & {TIED_HEAD})
    if seen != expected:
        raise WeightTransferError(f"{where}: {_difference(seen, expected)}; send every tensor of the model, once")
    if model.tied_head and TIED_HEAD in seen and not _head_is_tied(index.path.parent / b.file for b in index.buckets):
        raise WeightTransferError(
            f"{where}: the model's head is tied, but {TIED_HEAD} equals no other tensor; leave it out, or untie them"
        )
    return Transfer(index, received)


def load_bucket(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of one bucket, mapped from shared memory."""
    return load_file(path)


def register() -> None:
    """Entry point `vllm.general_plugins`: makes the receiving engine known to vLLM, in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load plugins more than once in a process, and refuses a second registration of one name.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rlhf_core.rollout.shm_engine", "SharedMemoryWeightTransferEngine"
        )


def _read_bucket(path: Path, bucket: Bucket, where: str) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise WeightTransferError(f"{where}: {bucket.file} is missing, with {_listed(bucket.names)}") from None
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != bucket.sha256:
        raise WeightTransferError(
            f"{where}: {bucket.file} has SHA-256 {sha256}, its index says {bucket.sha256}; send the version again"
        )
    return content


def _check_tensors(tensors: Mapping[str, torch.Tensor], model: ModelSpec, where: str) -> None:
    """Shapes as in the checkpoint; dtype the sampler's, or one that float32 is on either side of.

    float32 to a 16-bit type is the rounding that loading a checkpoint does, a 16-bit type to float32 is exact. Between
    bfloat16 and float16 values are lost without a word.
    """
    for name, tensor in tensors.items():
        shape = model.shapes.get(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise WeightTransferError(f"{where}: {name} has shape {tuple(tensor.shape)}, the model's is {shape}")
        allowed = FLOATS if model.dtype == torch.float32 else (model.dtype, torch.float32)
        if tensor.dtype not in allowed:
            raise WeightTransferError(
                f"{where}: {name} is {tensor.dtype}, a sampler in {model.dtype} takes {_listed(map(str, allowed))}"
            )


def _head_is_tied(files: Iterable[Path]) -> bool:
    """Whether `lm_head.weight`, which one of the files holds, equals another tensor (families name it differently)."""
    opened = [load_bucket(file) for file in files]
    head = next(tensors[TIED_HEAD] for tensors in opened if TIED_HEAD in tensors)
    return any(
        name != TIED_HEAD and tensor.shape == head.shape and torch.equal(tensor, head)
        for tensors in opened
        for name, tensor in tensors.items()
    )


def _difference(given: Collection[str], expected: Collection[str]) -> str:
    missing, unknown = set(expected) - set(given), set(given) - set(expected)
    parts = [f"missing: {_listed(missing)}"] if missing else []
    parts += [f"not expected: {_listed(unknown)}"] if unknown else []
    return ", ".join(parts) or "the same names in another order or number"


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:SHOWN_NAMES])
    return shown if len(ordered) <= SHOWN_NAMES else f"{shown} and {len(ordered) - SHOWN_NAMES} more"
