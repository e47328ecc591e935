"""The two places a store can live in: a directory, and a bucket behind the S3 protocol.

Both offer the same few operations on store-relative POSIX paths. Nothing is ever visible half-written under its final
name.
"""

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from rlhf_core.store.keys import sha256_file

# Names with this prefix are files being written, or what a killed writer left; listings leave them out.
TEMPORARY_PREFIX = ".rlhf-tmp-"
_CHUNK_BYTES = 8 * 2**20
_CONFLICT_TRIES = 5

T = TypeVar("T")


class StoreError(Exception):
    """The store cannot be used, or holds something other than it should. One line: what, why, what to do."""


@dataclass(frozen=True)
class FileInfo:
    """`path` as listed; `size` in bytes; `modified`: unix seconds, by the store's clock."""

    path: str
    size: int
    modified: float


class Backend(Protocol):
    def probe(self) -> None: ...
    def read_bytes(self, path: str) -> bytes: ...
    def read_start(self, path: str, size: int) -> bytes: ...
    def digest(self, path: str) -> str: ...
    def write_bytes(self, path: str, data: bytes) -> None: ...
    def create(self, path: str, data: bytes) -> bool: ...
    def exists(self, path: str) -> bool: ...
    def list_names(self, path: str) -> list[str]: ...
    def list_files(self, path: str) -> list[str]: ...
    def file_infos(self, path: str) -> list[FileInfo]: ...
    def upload_file(self, local: Path, path: str) -> str: ...
    def download_file(self, path: str, local: Path) -> str: ...
    def delete_file(self, path: str) -> None: ...
    def delete_dir(self, path: str) -> None: ...


def _copy_hashed(source: IO[bytes], target: IO[bytes]) -> str:
    """Copies and returns the SHA-256 of the bytes that went through."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LocalFiles:
    """A directory. Writing is a temporary file beside the target, fsync, then rename (or link, to create)."""

    def __init__(self, root: Path):
        self.root = root

    def probe(self) -> None:
        """Writes and links a file where the store is, or would be made, and removes both. Raises OSError."""
        directory = self.root
        while not os.path.lexists(directory):
            directory = directory.parent
        if not directory.is_dir():
            raise NotADirectoryError(f"{directory} is not a directory")
        temporary, linked = (directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}" for _ in range(2))
        try:
            temporary.write_bytes(b"probe")
            os.link(temporary, linked)
        finally:
            for path in (temporary, linked):
                path.unlink(missing_ok=True)

    def read_bytes(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def read_start(self, path: str, size: int) -> bytes:
        with open(self.root / path, "rb") as file:
            return file.read(size)

    def digest(self, path: str) -> str:
        return sha256_file(self.root / path)

    def write_bytes(self, path: str, data: bytes) -> None:
        self._put(path, lambda file: file.write(data), os.replace)

    def create(self, path: str, data: bytes) -> bool:
        try:
            self._put(path, lambda file: file.write(data), os.link)
        except FileExistsError:
            return False
        return True

    def _put(self, path: str, fill: Callable[[IO[bytes]], T], move: Callable[[Path, Path], None]) -> T:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                result = fill(file)
                file.flush()
                os.fsync(file.fileno())
            move(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(target.parent)
        return result

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def list_names(self, path: str) -> list[str]:
        try:
            names = os.listdir(self.root / path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def list_files(self, path: str) -> list[str]:
        top = self.root / path
        return sorted(
            Path(parent, name).relative_to(top).as_posix()
            for parent, _, names in os.walk(top)
            for name in names
            if not name.startswith(TEMPORARY_PREFIX)
        )

    def file_infos(self, path: str) -> list[FileInfo]:
        """Half-written files are among them."""
        top = self.root / path
        infos: list[FileInfo] = []
        for parent, _, names in os.walk(top):
            for file in (Path(parent, name) for name in names):
                # Else it has gone since it was listed.
                with contextlib.suppress(FileNotFoundError):
                    state = file.stat()
                    infos.append(FileInfo(file.relative_to(top).as_posix(), state.st_size, state.st_mtime))
        return sorted(infos, key=lambda info: info.path)

    def upload_file(self, local: Path, path: str) -> str:
        with open(local, "rb") as source:
            return self._put(path, lambda target: _copy_hashed(source, target), os.replace)

    def download_file(self, path: str, local: Path) -> str:
        with open(self.root / path, "rb") as source, open(local, "wb") as target:
            return _copy_hashed(source, target)

    def delete_file(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def delete_dir(self, path: str) -> None:
        def missing_is_fine(_function: Any, _path: Any, error: tuple[Any, BaseException, Any]) -> None:
            if not isinstance(error[1], FileNotFoundError):
                raise error[1]

        shutil.rmtree(self.root / path, onerror=missing_is_fine)


class S3Files:
    """A prefix of a bucket. Address and credentials come from the AWS_* environment (AWS_ENDPOINT_URL for other
    makers' stores).

    s3fs runs its requests on a thread of its own: a process that has used a store must not fork.
    """

    def __init__(self, bucket: str, prefix: str):
        import s3fs  # loads botocore, which a store in a directory does not need

        self.bucket = bucket
        self.root = f"{bucket}/{prefix}" if prefix else bucket
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
        # The endpoint is an argument so that fsspec's cache of instances keeps two endpoints apart.
        self.fs: Any = s3fs.S3FileSystem(endpoint_url=endpoint, use_listings_cache=False)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """botocore's own errors, which are no OSErrors, and a missing bucket, which is no missing file, become
        StoreError.
        """
        from botocore.exceptions import BotoCoreError

        try:
            yield
        except BotoCoreError as error:
            raise StoreError(
                f"store 's3://{self.root}' cannot be reached: {_one_line(error)}; "
                "check AWS_ENDPOINT_URL and the credentials in the AWS_* variables"
            ) from error
        except FileNotFoundError as error:
            if _error_code(error) == "NoSuchBucket":
                raise StoreError(
                    f"store 's3://{self.root}' cannot be used: bucket {self.bucket!r} does not exist; "
                    "create it or give another"
                ) from error
            raise

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def probe(self) -> None:
        path = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        self.create(path, b"probe")
        self.delete_file(path)

    def read_bytes(self, path: str) -> bytes:
        with self._plain_errors():
            return self.fs.cat_file(self._at(path))

    def read_start(self, path: str, size: int) -> bytes:
        with self._plain_errors():
            return self.fs.cat_file(self._at(path), start=0, end=size)

    def digest(self, path: str) -> str:
        digest = hashlib.sha256()
        # Block after block: no cache that grows with the file.
        with self._plain_errors(), self.fs.open(self._at(path), "rb", block_size=_CHUNK_BYTES) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def write_bytes(self, path: str, data: bytes) -> None:
        with self._plain_errors():
            self.fs.pipe_file(self._at(path), data)

    def create(self, path: str, data: bytes) -> bool:
        for last in [False] * (_CONFLICT_TRIES - 1) + [True]:
            try:
                with self._plain_errors():
                    self.fs.pipe_file(self._at(path), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # S3 answers 409 when another conditional write of the object is in flight, and asks to try again;
                # stores of other makers leave out the field by which s3fs knows FileExistsError.
                code = _error_code(error)
                if code == "PreconditionFailed":
                    return False
                if code != "ConditionalRequestConflict" or last:
                    raise
            else:
                return True
        raise AssertionError("unreachable: the last try returns or raises")

    def exists(self, path: str) -> bool:
        with self._plain_errors():
            return self.fs.exists(self._at(path))

    def list_names(self, path: str) -> list[str]:
        with self._plain_errors():
            try:
                found = self.fs.ls(self._at(path), detail=False, refresh=True)
            except FileNotFoundError as error:
                if _error_code(error) == "NoSuchBucket":
                    raise
                return []
        names = {name.rstrip("/").rsplit("/", 1)[-1] for name in found if name.rstrip("/") != self._at(path)}
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def list_files(self, path: str) -> list[str]:
        with self._plain_errors():
            found = self.fs.find(self._at(path))
        top = f"{self._at(path)}/"
        return sorted(name.removeprefix(top) for name in found if name.startswith(top) and not name.endswith("/"))

    def file_infos(self, path: str) -> list[FileInfo]:
        with self._plain_errors():
            found: dict[str, dict[str, Any]] = self.fs.find(self._at(path), detail=True)
        top = f"{self._at(path)}/"
        return sorted(
            (
                FileInfo(name.removeprefix(top), int(one["size"]), one["LastModified"].timestamp())
                for name, one in found.items()
                if name.startswith(top) and not name.endswith("/")
            ),
            key=lambda info: info.path,
        )

    def upload_file(self, local: Path, path: str) -> str:
        digest = sha256_file(local)
        with self._plain_errors():
            self.fs.put_file(str(local), self._at(path))
        return digest

    def download_file(self, path: str, local: Path) -> str:
        with self._plain_errors():
            self.fs.get_file(self._at(path), str(local))
        return sha256_file(local)

    def delete_file(self, path: str) -> None:
        with self._plain_errors(), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._at(path))

    def delete_dir(self, path: str) -> None:
        with self._plain_errors(), contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._at(path), recursive=True)


def _error_code(error: OSError) -> str:
    """The S3 error code behind an error of s3fs, or ''."""
    from botocore.exceptions import ClientError

    cause = error.__cause__
    return cause.response.get("Error", {}).get("Code", "") if isinstance(cause, ClientError) else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
