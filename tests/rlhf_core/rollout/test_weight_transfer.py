"""Sender and checks of a transfer: torch and safetensors alone."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from rlhf_core.cluster.leftovers import ATTEMPT, leftovers
from rlhf_core.rollout.weight_transfer import (
    Transfer,
    TransferWriter,
    WeightTransferError,
    read_index,
    read_model_spec,
    read_transfer,
    transfer_directory,
)

Send = Callable[[Mapping[str, torch.Tensor], int], Path]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def receive(tiny: Any, index: Path, dtype: torch.dtype = torch.float32) -> Transfer:
    return read_transfer(read_index(index), read_model_spec(tiny.directory, dtype))


def rewrite(index: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))


def test_what_is_sent_is_what_lies_in_the_buckets(untied: Any, send: Send):
    weights = untied.weights(seed=1)
    index = read_index(send(weights, 3))
    files = [index.path.parent / bucket.file for bucket in index.buckets]
    assert len(files) > 3
    got = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert got.keys() == weights.keys()
    assert all(torch.equal(got[name], weights[name]) for name in weights)
    assert [b.sha256 for b in index.buckets] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    transfer = receive(untied, index.path)
    assert transfer.index.version == 3
    assert transfer.received == sum(file.stat().st_size for file in files)


def test_the_checksum_follows_the_values(untied: Any, send: Send):
    weights = untied.weights(seed=1)
    first, again = read_index(send(weights, 1)).checksum, read_index(send(weights, 2)).checksum
    weights[Q_PROJ][3, 5] += 1e-6
    assert first == again != read_index(send(weights, 3)).checksum


def test_a_tensor_may_change_after_it_was_added(tmp_path: Path):
    writer = TransferWriter(tmp_path / "t", 0, bucket_bytes=1 << 20)
    tensor = torch.ones(4)
    writer.add("a", tensor)
    tensor.zero_()
    writer.add("b", torch.arange(6.0).view(2, 3).t())
    index = writer.finish()
    got = load_file(tmp_path / "t" / index.buckets[0].file)
    assert got["a"].tolist() == [1, 1, 1, 1]
    assert got["b"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_nothing_can_be_received_before_finish(tmp_path: Path):
    writer = TransferWriter(tmp_path / "t", 0, bucket_bytes=1)
    writer.add("a", torch.ones(4))
    with pytest.raises(WeightTransferError, match="index is written last"):
        read_index(tmp_path / "t" / "index.json")


def test_a_name_twice_or_a_used_directory_is_refused(tmp_path: Path):
    writer = TransferWriter(tmp_path / "t", 0, bucket_bytes=1)
    writer.add("a", torch.ones(4))
    with pytest.raises(WeightTransferError, match="tensor a was added twice"):
        writer.add("a", torch.ones(4))
    with pytest.raises(WeightTransferError, match="not empty"):
        TransferWriter(tmp_path / "t", 1, bucket_bytes=1)


def test_one_tensor_left_out_is_named(untied: Any, send: Send):
    weights = untied.weights(seed=1)
    del weights[Q_PROJ]
    with pytest.raises(WeightTransferError, match=f"version 4.*missing: {Q_PROJ};"):
        receive(untied, send(weights, 4))


def test_a_tensor_the_model_does_not_have_is_named(untied: Any, send: Send):
    with pytest.raises(WeightTransferError, match=r"not expected: score\.weight"):
        receive(untied, send({**untied.weights(seed=1), "score.weight": torch.ones(1, 128)}, 1))


def test_a_missing_bucket_is_named_with_its_tensors(untied: Any, send: Send):
    index = read_index(send(untied.weights(seed=1), 1))
    (index.path.parent / index.buckets[1].file).unlink()
    first = min(index.buckets[1].names)
    with pytest.raises(WeightTransferError, match=f"bucket-00001.safetensors is missing, with {first}"):
        receive(untied, index.path)


def test_one_flipped_bit_is_seen(untied: Any, send: Send):
    index = read_index(send(untied.weights(seed=1), 1))
    file = index.path.parent / index.buckets[2].file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WeightTransferError, match=r"bucket-00002\.safetensors has SHA-256 .*send the version again"):
        receive(untied, index.path)


def test_a_cut_bucket_is_seen(untied: Any, send: Send):
    index = read_index(send(untied.weights(seed=1), 1))
    file = index.path.parent / index.buckets[0].file
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightTransferError, match="SHA-256"):
        receive(untied, index.path)


def test_a_bucket_that_is_no_safetensors_file_is_refused(untied: Any, send: Send):
    index = send(untied.weights(seed=1), 1)
    garbage = b"\xff" * 64
    (index.parent / "bucket-00000.safetensors").write_bytes(garbage)
    rewrite(index, lambda c: c["buckets"][0].update(sha256=hashlib.sha256(garbage).hexdigest()))
    with pytest.raises(WeightTransferError, match="not a safetensors file"):
        receive(untied, index)


def test_a_bucket_with_other_tensors_than_the_index_says_is_refused(untied: Any, send: Send):
    index = send(untied.weights(seed=1), 1)
    other = save({"other": torch.ones(1)})
    (index.parent / "bucket-00000.safetensors").write_bytes(other)
    rewrite(index, lambda c: c["buckets"][0].update(sha256=hashlib.sha256(other).hexdigest()))
    with pytest.raises(WeightTransferError, match=r"bucket-00000.*not expected: other"):
        receive(untied, index)


def test_a_bucket_listed_twice_is_refused(untied: Any, send: Send):
    index = send(untied.weights(seed=1), 1)

    def repeat(content: dict[str, Any]) -> None:
        content["buckets"].append(content["buckets"][0])
        content["names"] += content["buckets"][0]["names"]

    rewrite(index, repeat)
    with pytest.raises(WeightTransferError, match="sent twice"):
        receive(untied, index)


def test_another_shape_is_named(untied: Any, send: Send):
    weights = untied.weights(seed=1)
    weights[Q_PROJ] = weights[Q_PROJ].reshape(64, 256)
    with pytest.raises(WeightTransferError, match=rf"{Q_PROJ} has shape \(64, 256\), the model's is \(128, 128\)"):
        receive(untied, send(weights, 1))


@pytest.mark.parametrize(
    ("sent", "sampler", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float64, torch.float32, False),
        (torch.int8, torch.float32, False),
    ],
)
def test_dtypes_between_which_values_are_lost_are_refused(
    untied: Any, send: Send, sent: torch.dtype, sampler: torch.dtype, fits: bool
):
    weights = untied.weights(seed=1)
    weights[Q_PROJ] = weights[Q_PROJ].to(sent)
    index = send(weights, 1)
    if fits:
        receive(untied, index, sampler)
    else:
        with pytest.raises(WeightTransferError, match=f"{Q_PROJ} is {sent}, a sampler in {sampler} takes"):
            receive(untied, index, sampler)


def test_a_tied_head_may_be_left_out_or_sent_equal_but_not_different(tied: Any, send: Send):
    weights = tied.weights(seed=1)
    assert "lm_head.weight" not in weights
    embedding = weights["model.embed_tokens.weight"]
    receive(tied, send(weights, 1))
    receive(tied, send({**weights, "lm_head.weight": embedding.clone()}, 2))
    with pytest.raises(WeightTransferError, match=r"head is tied, but lm_head\.weight equals no other tensor"):
        receive(tied, send({**weights, "lm_head.weight": embedding + 1e-3}, 3))


def test_an_untied_head_may_not_be_left_out(untied: Any, send: Send):
    weights = untied.weights(seed=1)
    del weights["lm_head.weight"]
    with pytest.raises(WeightTransferError, match=r"missing: lm_head\.weight"):
        receive(untied, send(weights, 1))


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"version": 1, "buckets": [{}], "names": []}'])
def test_what_is_no_index_is_refused(tmp_path: Path, content: str):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(WeightTransferError, match="is not the index of a transfer"):
        read_index(tmp_path / "index.json")


def test_an_index_whose_names_and_buckets_differ_is_refused(untied: Any, send: Send):
    index = send(untied.weights(seed=1), 1)
    rewrite(index, lambda c: c["names"].remove(Q_PROJ))
    with pytest.raises(WeightTransferError, match=f"not expected: {Q_PROJ}"):
        read_index(index)


def test_a_model_directory_without_weights_or_config_is_named(tmp_path: Path, untied: Any):
    with pytest.raises(WeightTransferError, match=r"no config\.json"):
        read_model_spec(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text((untied.directory / "config.json").read_text())
    with pytest.raises(WeightTransferError, match="holds no weights"):
        read_model_spec(tmp_path, torch.float32)


def test_a_checkpoint_that_contradicts_its_tied_head_is_refused(tmp_path: Path, tied: Any):
    (tmp_path / "config.json").write_text((tied.directory / "config.json").read_text())
    weights = tied.weights(seed=0)
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert read_model_spec(tmp_path, torch.float32).tied_head
    save_file({**weights, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightTransferError, match=r"config\.json ties the head, but lm_head\.weight equals no other"):
        read_model_spec(tmp_path, torch.float32)


def test_the_module_that_trainer_and_plugin_import_does_not_bring_vllm():
    heavy = "{'vllm', 'transformers', 'ray'}"
    code = f"import sys, rlhf_core.rollout.weight_transfer; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_directory_of_a_transfer_is_found_by_its_attempt_and_goes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = f"test{os.getpid()}"
    monkeypatch.setenv(ATTEMPT, attempt)
    with transfer_directory(tmp_path) as directory:
        (directory / "bucket").write_bytes(b"")
        assert leftovers(attempt) == [directory]
        assert leftovers(attempt[:-1]) == []
    assert leftovers(attempt) == []
