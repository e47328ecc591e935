"""The store: artifacts, training checkpoints and leases below one URL."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from rlhf_core.store.backends import TEMPORARY_PREFIX, Backend, FileInfo, LocalFiles, S3Files, StoreError
from rlhf_core.store.keys import sha256_file

__all__ = ["Store", "StoreError", "check_relative"]


def check_relative(path: str) -> str:
    """`path` itself. Raises ValueError unless it is a store-relative POSIX path: no leading '/', no '.', '..' or
    empty part.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or PurePosixPath(path).is_absolute():
        raise ValueError(f"store path {path!r}; it must be relative, without empty, '.' or '..' parts")
    if any(part.startswith(TEMPORARY_PREFIX) for part in parts):
        raise ValueError(f"store path {path!r}; names that start with {TEMPORARY_PREFIX!r} are the store's own")
    return path


def _open_backend(url: str) -> tuple[Backend, str]:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        if not (rest if separator else url):
            raise StoreError(f"store {url!r} names no directory; give a directory or s3://bucket/prefix")
        root = Path(rest if separator else url).expanduser().absolute()
        return LocalFiles(root), str(root)
    if scheme == "s3":
        bucket, _, prefix = rest.strip("/").partition("/")
        if not bucket:
            raise StoreError(f"store {url!r} names no bucket; give s3://bucket/prefix")
        return S3Files(bucket, prefix), f"s3://{bucket}/{prefix}".rstrip("/")
    raise StoreError(
        f"store {url!r} has the scheme {scheme!r}; give a directory, file:///directory or s3://bucket/prefix"
    )


class Store:
    """Files below `url`, which is a directory (made absolute), file:///directory or s3://bucket/prefix.

    All paths are POSIX and relative to it. Opening does not touch the store; `check_writable` does. Whatever keeps a
    file or directory from being read, written or deleted is a StoreError, one line; only what is missing is a
    FileNotFoundError.
    """

    def __init__(self, url: str):
        self._backend, self.url = _open_backend(url)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return Store, (self.url,)

    def check_writable(self) -> None:
        """Writes a probe, conditionally, and removes it. Raises StoreError, one line, and leaves nothing behind."""
        try:
            self._backend.probe()
        except OSError as error:
            why = " ".join((error.strerror or str(error)).split())
            raise StoreError(
                f"store {self.url!r} cannot be written: {why}; give a directory or an s3://bucket/prefix "
                "that this user can write and delete in"
            ) from error

    def read_bytes(self, path: str) -> bytes:
        """Raises FileNotFoundError when there is no such file."""
        with self._plain_errors("read", path):
            return self._backend.read_bytes(check_relative(path))

    def read_start(self, path: str, size: int) -> bytes:
        """The first `size` bytes, or all of a shorter file. Raises FileNotFoundError when there is no such file."""
        with self._plain_errors("read", path):
            return self._backend.read_start(check_relative(path), size)

    def digest(self, path: str) -> str:
        """SHA-256 of a file, read in pieces. Raises FileNotFoundError when there is no such file."""
        with self._plain_errors("read", path):
            return self._backend.digest(check_relative(path))

    def write_bytes(self, path: str, data: bytes) -> None:
        """Replaces the file at once: a reader sees the old content or the new."""
        with self._plain_errors("written", path):
            self._backend.write_bytes(check_relative(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Writes only if nothing is there: True if this call wrote, False if a file was there.

        A store may ignore the condition, or answer False to a repeated request whose first answer was lost: read back
        and compare.
        """
        with self._plain_errors("written", path):
            return self._backend.create(check_relative(path), data)

    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""
        with self._plain_errors("read", path):
            return self._backend.exists(check_relative(path))

    def list_names(self, path: str) -> list[str]:
        """Sorted names of the files and directories directly below `path` ('' for the top); [] when there is none.
        Never cached.
        """
        with self._plain_errors("listed", path):
            return self._backend.list_names(check_relative(path) if path else path)

    def list_files(self, path: str) -> list[str]:
        """Sorted relative paths of all files below `path`, at any depth; [] when there is none."""
        with self._plain_errors("listed", path):
            return self._backend.list_files(check_relative(path))

    def file_infos(self, path: str) -> list[FileInfo]:
        """All files below `path` with size and time, those included that a writer has not finished or left behind."""
        with self._plain_errors("listed", path):
            return self._backend.file_infos(check_relative(path))

    def upload_file(self, local: str | Path, path: str) -> str:
        """Copies a local file in and returns its SHA-256."""
        with self._plain_errors("written", path):
            return self._backend.upload_file(Path(local), check_relative(path))

    def upload_dir(self, local_dir: str | Path, path: str) -> dict[str, str]:
        """Copies every file below `local_dir` to the same relative path below `path`. Returns relative path to
        SHA-256.
        """
        top = Path(local_dir)
        if not top.is_dir():
            raise NotADirectoryError(f"{str(local_dir)!r} is not a directory that could be uploaded to {self.url!r}")
        names = sorted(file.relative_to(top).as_posix() for file in top.rglob("*") if file.is_file())
        return {name: self.upload_file(top / name, f"{path}/{name}") for name in names}

    def download_file(self, path: str, local: str | Path) -> str:
        """Copies a file out and returns its SHA-256. Raises FileNotFoundError when there is no such file."""
        with self._plain_errors("fetched", path):
            return self._backend.download_file(check_relative(path), Path(local))

    def download_dir(self, path: str, local_dir: str | Path) -> dict[str, str]:
        """Copies every file below `path` out. Returns relative path to SHA-256; raises FileNotFoundError when there
        is none.
        """
        names = self.list_files(path)
        if not names:
            raise FileNotFoundError(f"{path!r} holds no files in store {self.url!r}")
        return {name: self._download_below(path, name, Path(local_dir)) for name in names}

    def _download_below(self, path: str, name: str, local_dir: Path) -> str:
        target = local_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return self.download_file(f"{path}/{name}", target)

    def download_verified(self, path: str, files: dict[str, str], dest: str | Path) -> Path:
        """Makes `dest` a directory with exactly these files (relative path to SHA-256) from below `path`, all or
        nothing.

        A `dest` that already has them is verified and kept; an empty one is filled. Raises StoreError, naming the
        file, when the store lacks one or has other bytes, or when `dest` holds something else.
        """
        dest = Path(dest).absolute()
        if dest.is_dir() and any(dest.iterdir()):
            return _verify_directory(dest, files)
        dest.parent.mkdir(parents=True, exist_ok=True)
        temporary = dest.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            for name, expected in sorted(files.items()):
                try:
                    found = self._download_below(path, check_relative(name), temporary)
                except FileNotFoundError as error:
                    raise StoreError(
                        f"{path}/{name} is missing from store {self.url!r}; what lists it is damaged"
                    ) from error
                if found != expected:
                    raise StoreError(
                        f"{path}/{name} in store {self.url!r} has SHA-256 {found}, expected {expected}: damaged"
                    )
            try:
                temporary.rename(dest)
            except OSError:
                if not dest.is_dir():
                    raise
                # Another process filled `dest` meanwhile.
                return _verify_directory(dest, files)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return dest

    def delete_file(self, path: str) -> None:
        """Absent is fine."""
        with self._plain_errors("deleted", path):
            self._backend.delete_file(check_relative(path))

    def delete_dir(self, path: str) -> None:
        """Deletes every file below `path`. Absent is fine."""
        with self._plain_errors("deleted", path):
            self._backend.delete_dir(check_relative(path))

    @contextmanager
    def _plain_errors(self, done: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(
                f"{path or 'the top'} in store {self.url!r} cannot be {done}: {why}; "
                "give a directory or an s3://bucket/prefix that this user can read and write"
            ) from error


def _verify_directory(directory: Path, files: dict[str, str]) -> Path:
    present = {file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()}
    for name in sorted(present | set(files)):
        if name not in files:
            problem = "is not part of it"
        elif name not in present:
            problem = "is missing"
        elif sha256_file(directory / name) != files[name]:
            problem = "has other content"
        else:
            continue
        raise StoreError(
            f"{str(directory)!r} is not the directory to be fetched ({name!r} {problem}); remove it or give another"
        )
    return directory
