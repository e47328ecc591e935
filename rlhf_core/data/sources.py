"""Reads rows as they are from files, folders, loaders and the Hugging Face hub, local or on an object store."""

import csv
import io
import json
import posixpath
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fsspec
import numpy as np

from rlhf_core.data.errors import DataError
from rlhf_core.data.rows import Row, lines

# What a file holds: its rows, or the rows of each split.
Content = list[Row] | dict[str, list[Row]]


def read_path(url: str, split: str | None) -> list[Row]:
    """The rows of a file or save_to_disk folder at a path or fsspec URL. Raises DataError.

    `split`: which one, where it has several; None: `train`, or the only one.
    """
    suffix = posixpath.splitext(url)[1].lower()
    if suffix == ".py":
        rows = _run_loader(url, _read_bytes(url), split or "train")
    else:
        rows = _pick_split(url, _read(url, suffix), split)
    if not rows:
        where = f" in split {split}" if split else ""
        raise DataError(f"data file {url} has no rows{where}; give a file with at least one")
    if not all(isinstance(row, dict) and all(isinstance(name, str) for name in row) for row in rows):
        raise DataError(f"data file {url} holds rows that are not objects with named columns")
    return rows


def _read(url: str, suffix: str) -> Content:
    if suffix in _READERS:
        content = _read_bytes(url)
        try:
            return _READERS[suffix](content)
        except (ValueError, OSError, csv.Error) as error:  # pyarrow's are ValueErrors, or OSErrors where data is cut
            raise DataError(f"data file {url} is not {suffix[1:].upper()}: {_line(error)}") from None
    if _is_folder(url):
        return _read_saved(url)
    raise DataError(
        f"data file {url} has the suffix {suffix or 'none'!r}; allowed: {', '.join(sorted(_READERS))}, .py, and a "
        f"folder that `datasets` saved with save_to_disk"
    )


def _read_bytes(url: str) -> bytes:
    try:
        with fsspec.open(url, "rb") as file:
            return file.read()  # type: ignore[union-attr]
    except FileNotFoundError:
        raise DataError(f"data file {url} does not exist; give the path or s3:// URL of a data file") from None
    except OSError as error:
        raise DataError(f"data file {url} cannot be read: {_line(error)}") from error


def _is_folder(url: str) -> bool:
    filesystem, path = fsspec.core.url_to_fs(url)
    if not filesystem.exists(path):
        raise DataError(f"data file {url} does not exist; give the path or s3:// URL of a data file")
    return filesystem.isdir(path)


def _pick_split(url: str, content: Content, split: str | None) -> list[Row]:
    if isinstance(content, list):
        if split is not None:
            raise DataError(f"data file {url} has no splits, and {split} is asked for; leave the split out")
        return content
    return content[_chosen_split(f"data file {url}", content, split)]


def _chosen_split(where: str, splits: Iterable[str], split: str | None) -> str:
    """The split that is asked for, else train, or the only one. Raises DataError, which starts with `where`."""
    names = sorted(splits)
    if split is None:
        split = "train" if "train" in names else names[0] if len(names) == 1 else None
    if split not in names:
        asked = f"no split {split}" if split else "several splits"
        raise DataError(f"{where} has {asked}; set `split` to one of {', '.join(names)}")
    return split


def _read_json(content: bytes) -> Content:
    rows = json.loads(content)
    if isinstance(rows, dict) and rows and all(isinstance(value, list) for value in rows.values()):
        return rows
    if not isinstance(rows, list):
        raise ValueError("it holds neither a list of objects nor an object with a list for each split")
    return rows


def _read_jsonl(content: bytes) -> Content:
    numbered = enumerate(lines(content.decode("utf-8-sig")), start=1)
    return [_read_line(number, line) for number, line in numbered if line.strip()]


def _read_line(number: int, line: str) -> Row:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at line {number}, column {error.colno}") from None


def _read_csv(content: bytes) -> Content:
    csv.field_size_limit(sys.maxsize)  # its default, 131072 characters, is less than a long document
    reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
    rows: list[Row] = []
    for row in reader:
        if None in row:  # where the reader puts cells without a name
            raise ValueError(f"line {reader.line_num} has more cells than the header has names")
        rows.append({name: None if value in ("NaN", "nan") else value for name, value in row.items()})
    return rows


def _read_parquet(content: bytes) -> Content:
    import pyarrow.parquet

    return _arrow_rows(pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist())


def _read_arrow(content: bytes) -> Content:
    """Arrow's two formats: the file, which starts with its name, and the stream, as `datasets` writes it."""
    import pyarrow.ipc

    opened = pyarrow.ipc.open_file if content.startswith(b"ARROW1") else pyarrow.ipc.open_stream
    return _arrow_rows(opened(content).read_all().to_pylist())


_READERS: dict[str, Callable[[bytes], Content]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}


def _read_saved(url: str) -> Content:
    """A folder that `datasets` wrote with save_to_disk: a data set, or one with splits."""
    import datasets

    try:
        saved = datasets.load_from_disk(url)
    except (OSError, ValueError) as error:
        raise DataError(
            f"data folder {url} cannot be read: {_line(error)}; give a folder that `datasets` saved with save_to_disk"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        return {str(name): _arrow_rows(part.to_list()) for name, part in saved.items()}
    return _arrow_rows(saved.to_list())


def _arrow_rows(rows: list[Row]) -> list[Row]:
    """Rows that come from Arrow, without the nulls inside of values; a null column of a row stays.

    Arrow gives every object the fields of all objects in its column, so a null there is a field that this one lacks,
    e.g. an argument of another row's tool call.
    """
    return [{name: _without_nulls(value) for name, value in row.items()} for row in rows]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _run_loader(url: str, source: bytes, split: str) -> list[Row]:
    """What `load_rows(split)` of the user's file gives. It is the user's code and runs in this process."""
    module = types.ModuleType("rlhf_data_loader")
    module.__file__ = url
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for what it defines
    try:
        exec(compile(source, url, "exec"), module.__dict__)
        load_rows = module.__dict__.get("load_rows")
        if not callable(load_rows):
            raise DataError(
                f"loader {url} defines no load_rows; give it `def load_rows(split): ...`, which yields rows"
            )
        rows: Any = load_rows(split)
        if rows is None or isinstance(rows, str | bytes | Mapping):
            raise DataError(f"loader {url}: load_rows gave a {type(rows).__name__}; it must give or yield dicts")
        return [_plain(row) for row in rows]
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"loader {url} failed: {type(error).__name__}: {_line(error)}{_where(error, url)}") from error
    finally:
        sys.modules.pop(module.__name__, None)


def _plain(value: Any) -> Any:
    """A value as JSON would give it: NumPy's scalars and arrays, which pandas gives as well, and tuples."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _where(error: Exception, url: str) -> str:
    """The innermost line of the user's file that the error passed."""
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == url]
    number = error.lineno if isinstance(error, SyntaxError) else numbers[-1] if numbers else None
    return f" (line {number})" if number else ""


def hub_commit(name: str, revision: str | None) -> str:
    """The commit that a branch or tag of a hub data set stands for; a whole commit is itself, without a request.

    Raises OSError or ValueError where the hub cannot be asked or does not know it.
    """
    if revision is not None and len(revision) == 40 and set(revision) <= set("0123456789abcdef"):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except HTTPError as error:  # of the client's transport, e.g. a refused connection, which is no OSError
        raise ConnectionError(_line(error)) from error
    if commit is None:
        raise ValueError(f"the hub gives no commit for {name}")
    return commit


def read_hub(name: str, revision: str | None, subset: str | None, split: str | None) -> list[Row]:
    """The rows of a data set on the hub, at the commit of `revision`. Scripts of data sets are not run.

    `split`: also a slice, as train[:10%]; None: `train`, or the only one. Raises DataError.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        commit = hub_commit(name, revision)
        loaded = datasets.load_dataset(name, subset, split=split, revision=commit)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(f"hub data set {name} cannot be read: {_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        split = _chosen_split(f"hub data set {name}", map(str, loaded), split)
        loaded = loaded[split]
    rows = _arrow_rows(loaded.to_list())
    if not rows:
        raise DataError(f"hub data set {name} has no rows in split {split}; give another")
    return rows


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
