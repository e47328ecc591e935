import enum
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.store import keys
from rlhf_core.store.store import Store

BASE: dict[str, Any] = {
    "stage": "sft",
    "version": 1,
    "settings": {"optimizer": {"lr": 1e-06, "betas": [0.9, 0.95]}, "seed": 0},
    "inputs": {"data": "ab" * 32},
    "data": {},
    "code": {},
}


class Colour(enum.StrEnum):
    RED = "red"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_stage_key_is_the_sha256_of_this_text() -> None:
    by_hand = (
        '{"code":{},"data":{},"inputs":{"data":"' + "ab" * 32 + '"},'
        '"settings":{"optimizer":{"betas":[0.9,0.95],"lr":1e-06},"seed":0},"stage":"sft","version":1}'
    )
    found = keys.stage_key(**BASE)
    assert found.key == sha256(by_hand)
    assert found.source == json.loads(by_hand)


def test_order_of_fields_does_not_change_the_key() -> None:
    reordered = {**BASE, "settings": {"seed": 0, "optimizer": {"betas": [0.9, 0.95], "lr": 1e-06}}}
    assert keys.stage_key(**reordered).key == keys.stage_key(**BASE).key


def test_an_empty_salt_leaves_no_trace() -> None:
    assert keys.stage_key(**BASE, salt="") == keys.stage_key(**BASE)
    assert "salt" not in keys.stage_key(**BASE).source


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "rm"},
        {"version": 2},
        {"settings": {**BASE["settings"], "seed": 1}},
        {"settings": {**BASE["settings"], "extra": None}},
        {"inputs": {"data": "cd" * 32}},
        {"inputs": {"other": "ab" * 32}},
        {"data": {"rows": "ab" * 32}},
        {"code": {"reward": "ab" * 32}},
        {"salt": "again"},
    ],
)
def test_every_part_changes_the_key(change: dict[str, Any]) -> None:
    assert keys.stage_key(**{**BASE, **change}).key != keys.stage_key(**BASE).key


def test_source_is_a_copy() -> None:
    settings = {"seed": 0}
    found = keys.stage_key(**{**BASE, "settings": settings})
    settings["seed"] = 1
    assert sha256(keys.canonical_json(found.source)) == found.key


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": (1, 2)}, r"\$\.a is a tuple"),
        ({"a": [Colour.RED]}, r"\$\.a\[0\] is a Colour"),
        ({"a": Path("x")}, r"\$\.a is a "),
        ({1: 2}, r"\$ has the key 1 of type int"),
    ],
)
def test_types_that_json_lacks_are_refused(value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        keys.canonical_json(value)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_lacks_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match=r"\$\.lr is"):
        keys.canonical_json({"lr": number})


def test_floats_are_written_by_repr_and_text_in_ascii() -> None:
    assert keys.canonical_json({"é": [0.1 + 0.2, 1e22, 1, True, None]}) == (
        '{"\\u00e9":[0.30000000000000004,1e+22,1,true,null]}'
    )


@pytest.mark.parametrize("stage", ["", "SFT", "a/b", "../x", "1a"])
def test_stage_names_that_make_no_path_are_refused(stage: str) -> None:
    with pytest.raises(ValueError, match="stage name"):
        keys.stage_key(**{**BASE, "stage": stage})


def test_an_input_without_a_key_is_refused() -> None:
    with pytest.raises(TypeError, match=r"inputs\['model'\]"):
        keys.stage_key(**{**BASE, "inputs": {"model": None}})


def old_file(path: Path, text: str, mtime: int = 1_000_000_000) -> Path:
    path.write_text(text)
    os.utime(path, (mtime, mtime))
    return path


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []

    def counted(path: Any) -> str:
        read.append(str(path))
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    monkeypatch.setattr(keys, "sha256_file", counted)
    return read


def test_a_fingerprint_is_remembered_until_size_or_mtime_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    file = old_file(tmp_path / "rows", "one")
    assert [keys.file_fingerprint(file), keys.file_fingerprint(file)] == [sha256("one")] * 2
    assert len(read) == 1
    old_file(file, "two", mtime=1_000_000_001)
    assert keys.file_fingerprint(file) == sha256("two")
    old_file(file, "four", mtime=1_000_000_001)
    assert keys.file_fingerprint(file) == sha256("four")
    assert len(read) == 3


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_reads(monkeypatch)
    file = tmp_path / "rows"
    file.write_text("one")
    keys.file_fingerprint(file)
    keys.file_fingerprint(file)
    assert len(read) == 2


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"sha256": 1}'])
def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, damage: str) -> None:
    file = old_file(tmp_path / "rows", "one")
    keys.file_fingerprint(file)
    (entry,) = (tmp_path / "cache" / "rlhf-flows" / "fingerprints").iterdir()
    entry.write_text(damage)
    assert keys.file_fingerprint(file) == sha256("one")


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("a file where the cache directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    assert keys.file_fingerprint(old_file(tmp_path / "rows", "one")) == sha256("one")


def test_many_at_once_agree(tmp_path: Path) -> None:
    file = old_file(tmp_path / "rows", "one")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: keys.file_fingerprint(file), range(64))) == {sha256("one")}
    assert len(list((tmp_path / "cache" / "rlhf-flows" / "fingerprints").iterdir())) == 1


def test_directory_digest_is_over_sorted_names_and_content(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "b").write_text("bee")
    (model / "sub" / "a").write_text("ay")
    (model / ".cache").mkdir()
    (model / ".cache" / "downloaded-at").write_text("now")
    by_hand = f'[["b","{sha256("bee")}"],["sub/a","{sha256("ay")}"]]'
    assert keys.directory_digest(model) == sha256(by_hand)
    (model / ".cache" / "downloaded-at").write_text("later")
    assert keys.directory_digest(model) == sha256(by_hand)
    (model / "b").rename(model / "c")
    assert keys.directory_digest(model) != sha256(by_hand)


def test_directory_digest_follows_links_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").write_text("weights")
    linked, plain = tmp_path / "linked", tmp_path / "plain"
    linked.mkdir()
    plain.mkdir()
    (linked / "model").symlink_to(tmp_path / "blobs" / "x")
    (plain / "model").write_text("weights")
    assert keys.directory_digest(linked) == keys.directory_digest(plain)
    (linked / "loop").symlink_to(linked)
    with pytest.raises(ValueError, match="twice through links"):
        keys.directory_digest(linked)


def test_directory_digest_refuses_what_is_no_directory_of_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        keys.directory_digest(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="holds no files"):
        keys.directory_digest(tmp_path / "empty")
    with pytest.raises(NotADirectoryError):
        keys.directory_digest(tmp_path / "file")


def test_remote_fingerprint_of_local_paths_is_of_content(tmp_path: Path) -> None:
    file = old_file(tmp_path / "rows", "one")
    assert keys.remote_fingerprint(str(file)) == keys.remote_fingerprint(f"file://{file}") == sha256("one")
    with pytest.raises(FileNotFoundError):
        keys.remote_fingerprint(str(tmp_path / "absent"))


def test_remote_fingerprint_of_a_bucket(s3_url: str) -> None:
    store = Store(s3_url)
    store.write_bytes("d/b", b"bee")
    store.write_bytes("d/sub/a", b"ay")
    # The ETag of an object put in one piece is its MD5.
    rows = [["b", 3, hashlib.md5(b"bee").hexdigest()], ["sub/a", 2, hashlib.md5(b"ay").hexdigest()]]
    by_hand = json.dumps(rows, separators=(",", ":"))
    assert keys.remote_fingerprint(f"{s3_url}/d") == sha256(by_hand)
    one = json.dumps([rows[0]], separators=(",", ":"))
    assert keys.remote_fingerprint(f"{s3_url}/d/b") == sha256(one)
    store.write_bytes("d/b", b"BEE")
    assert keys.remote_fingerprint(f"{s3_url}/d") != sha256(by_hand)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        keys.remote_fingerprint(f"{s3_url}/absent")
