import copy
import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from rlhf_core.store.store import Store, StoreError


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_write_read_replace_delete(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read_bytes("a/b")
    store.write_bytes("a/b", b"one")
    store.write_bytes("a/b", b"two")
    assert store.read_bytes("a/b") == b"two"
    assert (store.exists("a/b"), store.exists("a"), store.exists("a/c")) == (True, True, False)
    store.delete_file("a/b")
    store.delete_file("a/b")
    assert not store.exists("a/b")


def test_create_keeps_what_is_there(store: Store) -> None:
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert store.read_bytes("a/b") == b"first"
    assert store.list_names("a") == ["b"]


def test_one_of_many_creates(store: Store) -> None:
    barrier = Barrier(8)

    def attempt(index: int) -> bool:
        barrier.wait()
        return store.create("race", str(index).encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert sum(won) == 1
    assert store.read_bytes("race") == str(won.index(True)).encode()


def test_listing_is_sorted_shallow_and_never_stale(store: Store) -> None:
    assert store.list_names("x") == []
    store.write_bytes("x/b", b"")
    assert store.list_names("x") == ["b"]
    store.write_bytes("x/a/deep", b"")
    assert store.list_names("x") == ["a", "b"]
    assert store.list_names("") == ["x"]
    assert store.list_files("x") == ["a/deep", "b"]
    # Another process, since all threads of this one share s3fs's instance and whatever it caches.
    program = "import sys; from rlhf_core.store.store import Store; s = Store(sys.argv[1]);"
    program += "s.delete_file('x/b'); s.write_bytes('x/a/new', b'')"
    subprocess.run([sys.executable, "-c", program, store.url], check=True)
    assert (store.exists("x/b"), store.exists("x/a/new")) == (False, True)
    assert store.list_names("x") == ["a"]
    assert store.list_files("x") == ["a/deep", "a/new"]


def test_directories_travel_with_their_digests(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_bytes(b"ay")
    (source / "sub" / "empty").write_bytes(b"")
    expected = {"a": sha256(b"ay"), "sub/empty": sha256(b"")}
    assert store.upload_dir(source, "t/dir") == expected
    assert store.download_dir("t/dir", tmp_path / "back") == expected
    assert (tmp_path / "back" / "a").read_bytes() == b"ay"
    store.write_bytes("t/dir2", b"a neighbour that shares the prefix")
    store.delete_dir("t/dir")
    store.delete_dir("t/dir")
    assert store.list_names("t") == ["dir2"]
    with pytest.raises(FileNotFoundError, match="holds no files"):
        store.download_dir("t/dir", tmp_path / "again")
    with pytest.raises(NotADirectoryError):
        store.upload_dir(source / "a", "t/dir")


def test_verified_download_is_whole_or_not_at_all(store: Store, tmp_path: Path) -> None:
    store.write_bytes("d/a", b"ay")
    store.write_bytes("d/sub/b", b"bee")
    files = {"a": sha256(b"ay"), "sub/b": sha256(b"bee")}
    dest = tmp_path / "out" / "dest"
    assert store.download_verified("d", files, dest) == dest
    assert (dest / "sub" / "b").read_bytes() == b"bee"
    assert store.download_verified("d", files, dest) == dest
    (dest / "a").write_bytes(b"AY")
    with pytest.raises(StoreError, match="'a' has other content"):
        store.download_verified("d", files, dest)

    store.write_bytes("d/sub/b", b"BEE")
    with pytest.raises(StoreError, match=r"d/sub/b .*damaged"):
        store.download_verified("d", files, tmp_path / "out" / "two")
    store.delete_file("d/sub/b")
    with pytest.raises(StoreError, match="d/sub/b is missing"):
        store.download_verified("d", files, tmp_path / "out" / "two")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["dest"]


def test_verified_downloads_at_once_share_a_destination(store: Store, tmp_path: Path) -> None:
    store.write_bytes("d/a", b"ay")
    barrier = Barrier(4)

    def fetch(_: int) -> bytes:
        barrier.wait()
        return (store.download_verified("d", {"a": sha256(b"ay")}, tmp_path / "out" / "dest") / "a").read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fetch, range(4))) == [b"ay"] * 4
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["dest"]


def test_check_writable_leaves_nothing(store: Store, tmp_path: Path) -> None:
    store.check_writable()
    assert store.list_names("") == []
    assert not (tmp_path / "store").exists()
    assert list(tmp_path.glob(".*")) == []


def refusal(url: str) -> str:
    with pytest.raises(StoreError) as error:
        Store(url).check_writable()
    message = str(error.value)
    assert "\n" not in message
    assert url in message
    return message


def test_a_file_in_place_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file is not a directory; give a directory" in refusal(str(tmp_path / "file"))
    assert f"{tmp_path}/file is not a directory; give a directory" in refusal(str(tmp_path / "file" / "below"))
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    assert "dangling is not a directory" in refusal(str(tmp_path / "dangling"))


def test_a_file_system_that_takes_no_files_is_refused() -> None:
    assert "cannot be written: No such file or directory; give a directory" in refusal("/proc/rlhf-store")


def test_what_keeps_a_file_from_being_used_is_one_line_and_what_is_missing_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a store")
    store = Store(str(tmp_path / "file"))
    for use in (
        lambda: store.read_bytes("a/b"),
        lambda: store.write_bytes("a/b", b""),
        lambda: store.create("a/b", b""),
        lambda: store.list_names("a"),
        lambda: store.upload_file(tmp_path / "file", "a/b"),
        lambda: store.download_file("a/b", tmp_path / "out"),
        lambda: store.delete_file("a/b"),
        lambda: store.delete_dir("a"),
    ):
        with pytest.raises(StoreError, match=r"^a(/b)? in store '.*/file' cannot be \w+: .*; give a directory"):
            use()
    with pytest.raises(FileNotFoundError):
        Store(str(tmp_path / "empty")).read_bytes("a/b")


def test_a_bucket_that_does_not_exist_is_refused(s3_url: str) -> None:
    assert "bucket 'no-such-bucket' does not exist; create it or give another" in refusal("s3://no-such-bucket/prefix")
    for use in (lambda s: s.read_bytes("a"), lambda s: s.list_names("a"), lambda s: s.write_bytes("a", b"")):
        with pytest.raises(StoreError, match="'no-such-bucket' does not exist"):
            use(Store("s3://no-such-bucket/prefix"))


def test_an_endpoint_that_does_not_answer_is_refused(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Port 1 is reserved and nothing listens there.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert "http://127.0.0.1:1" in refusal("s3://bucket/prefix")


@pytest.mark.parametrize(
    ("url", "message"),
    [("gs://bucket/x", "scheme 'gs'"), ("s3://", "names no bucket"), ("", "names no directory")],
)
def test_urls_that_name_no_store_are_refused(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        Store(url)


def test_urls_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Store("s").url == Store(f"file://{tmp_path}/s").url == str(tmp_path / "s")


@pytest.mark.parametrize("path", ["/a", "a//b", "../a", "a/../b", "a/", "./a", ".rlhf-tmp-x"])
def test_paths_that_leave_the_store_are_refused(store: Store, path: str) -> None:
    with pytest.raises(ValueError, match="store path"):
        store.write_bytes(path, b"")


def test_a_store_travels_by_its_url(store: Store) -> None:
    store.write_bytes("a", b"1")
    assert copy.deepcopy(store).read_bytes("a") == b"1"


def test_a_kill_while_writing_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from rlhf_core.store.store import Store
store = Store(sys.argv[1])
store.write_bytes("d/replaced", b"old")
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
getattr(store, sys.argv[2])(sys.argv[3], b"new")
"""
    for call, path in (("write_bytes", "d/replaced"), ("create", "d/created")):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path), call, path], check=False)
        assert done.returncode == -9
    store = Store(str(tmp_path))
    assert store.read_bytes("d/replaced") == b"old"
    assert store.list_names("d") == store.list_files("d") == ["replaced"]


def test_the_store_loads_without_torch_prefect_and_s3() -> None:
    program = (
        "import sys, rlhf_core.store.artifacts, rlhf_core.store.checkpoints;"
        "print([m for m in ('torch', 'prefect', 'ray', 'transformers', 's3fs', 'botocore') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
