import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rlhf_core.models.scratch import CHARACTERS, write_scratch_model

SIZES = {
    "hidden_size": 64,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate_size": 96,
    "max_position": 48,
    "seed": 0,
}
CONVERSATION = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "3+4=7#7"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_scratch_model(tmp_path_factory.mktemp("scratch") / "model", **SIZES)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def digests(directory):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in directory.iterdir()}


def test_the_same_arguments_give_the_same_bytes_whatever_the_random_state(directory, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = write_scratch_model(tmp_path / "again", **SIZES)
    assert torch.equal(torch.get_rng_state(), before)
    assert digests(again) == digests(directory)
    other = digests(write_scratch_model(tmp_path / "other", **{**SIZES, "seed": 1}))
    assert {name for name in other if other[name] != digests(directory)[name]} == {"model.safetensors"}


def test_the_auto_classes_load_what_was_asked_for(directory, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 32
    assert model.config.head_dim == 32
    assert model.config.num_key_value_heads == 1
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 48
    for owner in (model.config, model.generation_config):
        assert owner.bos_token_id == tokenizer.bos_token_id
        assert owner.eos_token_id == tokenizer.eos_token_id
        assert owner.pad_token_id == tokenizer.pad_token_id
    # embedding and head 2 * 32 * 64; a layer: q, o 64 * 64, k, v 32 * 64, mlp 3 * 64 * 96, two norms; the last norm
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == 2 * 32 * 64 + 2 * layer + 64


def test_dtype_and_tied_embeddings_are_saved(tmp_path):
    path = write_scratch_model(tmp_path / "m", **SIZES, dtype="bfloat16", tie_embeddings=True)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is True
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_prompt_is_rendered_with_one_bos_and_round_trips(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=True, tokenize=False)
    assert text == "<s><|user|>3+4=<|end|><|assistant|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "<|user|>", *"3+4=", "<|end|>", "<|assistant|>"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=True)["input_ids"] == ids


def test_prompt_and_response_are_exactly_the_full_render(tokenizer):
    prompt = tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=True, tokenize=False)
    full = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert full == prompt + "3+4=7#7" + tokenizer.eos_token
    parts = tokenizer(prompt)["input_ids"] + tokenizer("3+4=7#7")["input_ids"] + [tokenizer.eos_token_id]
    assert tokenizer(full)["input_ids"] == parts


def test_the_generation_mask_is_the_answer_and_its_eos(tokenizer):
    out = tokenizer.apply_chat_template(
        CONVERSATION * 2, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [i for i, on in zip(out["input_ids"], out["assistant_masks"], strict=True) if on]
    assert tokenizer.decode(marked) == "3+4=7#7<|end|>" * 2
    assert out["input_ids"].count(tokenizer.bos_token_id) == 1


def test_every_character_is_one_token_and_others_are_visibly_unknown(tokenizer):
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(set(ids)) == len(CHARACTERS)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == CHARACTERS
    assert tokenizer.convert_ids_to_tokens(tokenizer("3-\n 4")["input_ids"]) == ["3", "<unk>", "<unk>", "<unk>", "4"]


def test_the_template_refuses_other_roles(tokenizer):
    with pytest.raises(Exception, match="role 'system' is unknown to this template; use 'user' or 'assistant'"):
        tokenizer.apply_chat_template([{"role": "system", "content": "3"}], tokenize=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 66}, "hidden_size 66 with 2 heads.*multiple of 4"),
        ({"heads": 2, "kv_heads": 3}, "2 heads cannot share 3 kv_heads"),
        ({"dtype": "int8"}, "dtype is 'int8'; give one of float32, bfloat16, float16"),
    ],
)
def test_bad_sizes_are_refused_before_anything_is_written(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_scratch_model(tmp_path / "m", **{**SIZES, **change})
    assert not (tmp_path / "m").exists()


def test_a_directory_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError, match="is not empty; give a new or an empty directory"):
        write_scratch_model(tmp_path, **SIZES)
    assert [f.name for f in tmp_path.iterdir()] == ["mine.txt"]
