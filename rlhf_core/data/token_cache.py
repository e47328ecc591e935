"""Encoded items on disk: an Arrow file that is read where it lies, and a cache of such files in the store.

    <store>/cache/tokens/<key>/COMPLETE.json        conditional create, last; names the attempt that counts
    <store>/cache/tokens/<key>/<attempt>/           tokens.arrow, report.json

The key holds all that the tokens depend on: the rows' content, the tokenizer, its chat template, the settings, and
ENCODER_VERSION. An entry is never overwritten.
"""

import hashlib
import json
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rlhf_core.config.base import Settings
from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import ENCODER_VERSION, ItemSink
from rlhf_core.data.samples import Item, Sample
from rlhf_core.data.token_report import TokenReport

_TOKENS, _REPORT, _COMPLETE = "tokens.arrow", "report.json", "COMPLETE.json"
_ITEMS_PER_CHUNK = 1024
_SCALAR = "scalar."


class TokenStore(Protocol):
    """What the cache asks of a store (rlhf_core/store/store.py)."""

    def read_bytes(self, path: str) -> bytes: ...
    def create(self, path: str, data: bytes) -> bool: ...
    def upload_dir(self, local_dir: str | Path, path: str) -> dict[str, str]: ...
    def download_verified(self, path: str, files: dict[str, str], dest: str | Path) -> Path: ...


@dataclass(frozen=True)
class CachedTokens:
    """`hit` says whether they were there already."""

    table: "TokenTable"
    report: TokenReport
    hit: bool


def token_key(
    kind: str,
    rows_digest: str,
    tokenizer: Any,
    chat_template: str | dict[str, str] | None,
    text: TextSettings,
    max_len: int,
    settings: dict[str, Any] | None = None,
) -> str:
    """64 hex digits. chat_template: the one in use (`Encoder.chat_template`). settings: what the kind adds, as JSON."""
    source = {
        "kind": kind,
        "rows": rows_digest,
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": chat_template,
        "text": _without_path(text),
        "max_len": max_len,
        "settings": settings or {},
        "encoder": ENCODER_VERSION,
    }
    return hashlib.sha256(json.dumps(source, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _without_path(text: Settings) -> dict[str, Any]:
    """The template's content is in the key, where its file lies is not."""
    return text.model_dump(mode="json", exclude={"chat_template"})


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of the tokenizer: vocabulary, merges, normalisation, added and special tokens.

    How it was last told to pad or cut is left out: that is a call's, and our encoding does neither.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    content = {name: value for name, value in backend.items() if name not in ("padding", "truncation")}
    source = [content, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()


def cached_tokens(
    store: TokenStore, key: str, local_dir: str | Path, encode: Callable[[ItemSink], TokenReport]
) -> CachedTokens:
    """The items under `key`, made by `encode` and stored unless they are there. They are fetched to local_dir.

    Two that encode at once both store; the first to finish counts for both.
    """
    path = _path(key)
    complete = _read_complete(store, path)
    hit = complete is not None
    if complete is None:
        complete = _fill(store, path, encode)
    directory = _fetch(store, key, complete, local_dir)
    report = TokenReport.from_json((directory / _REPORT).read_text(encoding="utf-8"))
    return CachedTokens(TokenTable(directory / _TOKENS), report, hit)


def fetch_tokens(store: TokenStore, key: str, local_dir: str | Path) -> "TokenTable":
    """The items that `cached_tokens` has put under `key`, on this node. Raises KeyError where there are none."""
    complete = _read_complete(store, _path(key))
    if complete is None:
        raise KeyError(f"no tokens under {_path(key)}; the driver makes them before it starts its ranks")
    return TokenTable(_fetch(store, key, complete, local_dir) / _TOKENS)


def _path(key: str) -> str:
    return f"cache/tokens/{key}"


def _fetch(store: TokenStore, key: str, complete: Mapping[str, Any], local_dir: str | Path) -> Path:
    return store.download_verified(f"{_path(key)}/{complete['attempt']}", complete["files"], Path(local_dir) / key)


def _fill(store: TokenStore, path: str, encode: Callable[[ItemSink], TokenReport]) -> dict[str, Any]:
    attempt = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        with ItemWriter(Path(directory, _TOKENS)) as writer:
            report = encode(writer)
        Path(directory, _REPORT).write_text(report.to_json(), encoding="utf-8")
        files = store.upload_dir(directory, f"{path}/{attempt}")
    store.create(f"{path}/{_COMPLETE}", json.dumps({"attempt": attempt, "files": files}).encode())
    complete = _read_complete(store, path)  # whose attempt counts, the file says
    assert complete is not None, f"{path}/{_COMPLETE} vanished after it was written"
    return complete


def _read_complete(store: TokenStore, path: str) -> dict[str, Any] | None:
    try:
        return json.loads(store.read_bytes(f"{path}/{_COMPLETE}"))
    except FileNotFoundError:
        return None


class ItemWriter:
    """Writes items as they come. One row an item: `row`, `ids.<s>`, `weights.<s>`, `labels.<s>` of each sample,
    `scalar.<name>`.

    Raises ValueError where items differ in their number of samples, their scalars, or in having labels.
    """

    def __init__(self, path: Path):
        self._file = pa.OSFile(str(path), "wb")
        self._schema = pa.schema([("row", pa.int64())])
        self._writer: Any = None
        self._items: list[Item] = []
        self._row_ids: list[int] = []

    def __enter__(self) -> "ItemWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                self._flush()
                self._writer.close()

    def add(self, items: Sequence[Item], row_id: int) -> None:
        self._items += items
        self._row_ids += [row_id] * len(items)
        if len(self._items) >= _ITEMS_PER_CHUNK:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            self._schema = _schema(self._items[0]) if self._items else self._schema
            self._writer = pa.ipc.new_file(self._file, self._schema)
        columns = {"row": self._row_ids} | _columns(self._items, self._schema)
        arrays = [pa.array(columns[one.name], one.type) for one in self._schema]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._items, self._row_ids = [], []


def _schema(item: Item) -> pa.Schema:
    fields: list[tuple[str, pa.DataType]] = [("row", pa.int64())]
    for s, sample in enumerate(item.samples):
        fields += [(f"ids.{s}", pa.list_(pa.int32())), (f"weights.{s}", pa.list_(pa.float32()))]
        if sample.labels is not None:
            fields.append((f"labels.{s}", pa.list_(pa.float32())))
    return pa.schema([*fields, *((f"{_SCALAR}{name}", pa.float64()) for name in sorted(item.scalars))])


def _columns(items: Sequence[Item], schema: pa.Schema) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in schema.names if name != "row"}
    for item in items:
        values: dict[str, Any] = {f"{_SCALAR}{name}": value for name, value in item.scalars.items()}
        for s, sample in enumerate(item.samples):
            values |= {f"ids.{s}": sample.ids, f"weights.{s}": sample.weights}
            if sample.labels is not None:
                values[f"labels.{s}"] = sample.labels
        if values.keys() != columns.keys():
            raise ValueError(f"an item has {sorted(values)}, the first one {sorted(columns)}; all must have the same")
        for name, value in values.items():
            columns[name].append(value)
    return columns


class TokenTable:
    """Items in a file that is mapped into memory: what is not asked for is not read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            self._chunks = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            names = reader.schema.names
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in self._chunks)])
        self._samples = sum(name.startswith("ids.") for name in names)
        self._labelled = "labels.0" in names
        self._scalars = [name for name in names if name.startswith(_SCALAR)]

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Of the tokens with which responses end, as the report beside the items has them."""
        report = TokenReport.from_json(self.path.with_name(_REPORT).read_text(encoding="utf-8"))
        return tuple(sorted(report.end_tokens.values()))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[type["TokenTable"], tuple[Path]]:
        return TokenTable, (self.path,)

    def lengths(self) -> np.ndarray:
        """(items,) int64: tokens of each item, over its samples."""
        totals = np.zeros(len(self), np.int64)
        for s in range(self._samples):
            totals += np.concatenate([chunk.column(f"ids.{s}").value_lengths() for chunk in self._chunks])
        return totals

    def row_ids(self) -> np.ndarray:
        """(items,) int64: the number, from 0, of the row that each item comes from."""
        return np.concatenate([np.zeros(0, np.int64), *(chunk.column("row").to_numpy() for chunk in self._chunks)])

    def item(self, number: int) -> Item:
        """Raises IndexError outside 0 to len - 1."""
        if not 0 <= number < len(self):
            raise IndexError(f"item {number} of {len(self)}")
        chunk_number = int(np.searchsorted(self._starts, number, side="right")) - 1
        chunk, place = self._chunks[chunk_number], number - int(self._starts[chunk_number])

        def values(name: str) -> np.ndarray:
            return chunk.column(name)[place].values.to_numpy()

        samples = tuple(
            Sample(values(f"ids.{s}"), values(f"weights.{s}"), values(f"labels.{s}") if self._labelled else None)
            for s in range(self._samples)
        )
        scalars = {name.removeprefix(_SCALAR): chunk.column(name)[place].as_py() for name in self._scalars}
        return Item(samples, scalars)
