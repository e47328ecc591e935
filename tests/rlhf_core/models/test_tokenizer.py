"""Which token pads: one of the vocabulary, never EOS. Which tokens end a response."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlhf_core.models.tokenizer import load_tokenizer, stop_token_ids, tokenizer_facts, write_stop_token_ids

EOS = "<|end|>"
RIGHT_PAD = "<|finetune_right_pad_id|>"
RESERVED = [f"<|reserved_special_token_{i}|>" for i in (0, 1)]


def saved(directory: Path, special: list[str], **roles: str) -> Path:
    """A tokenizer of the words a and b and of `special` tokens, in this order."""
    words = ["a", "b", EOS, *special]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    others = [token for token in special if token not in roles.values()]
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, additional_special_tokens=others, **roles)
    made.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("pad", [{}, {"pad_token": EOS}])
@pytest.mark.parametrize(
    ("special", "roles", "chosen"),
    [
        ([*RESERVED, RIGHT_PAD, "<unk>"], {"unk_token": "<unk>"}, "<unk>"),
        ([*RESERVED, RIGHT_PAD], {}, RIGHT_PAD),
        ([*RESERVED, "<|im_start|>"], {}, RESERVED[0]),
        (["<|bos_pad|>", *RESERVED], {"bos_token": "<|bos_pad|>"}, RESERVED[0]),
        (RESERVED, {"unk_token": EOS}, RESERVED[0]),  # as GPT-2, whose unknown token is EOS
    ],
)
def test_pad_token_is_in_the_vocabulary_and_not_eos(
    tmp_path: Path, special: list[str], roles: dict[str, str], chosen: str, pad: dict[str, str]
) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, special, **roles, **pad))
    assert tokenizer.pad_token == chosen
    assert tokenizer.convert_ids_to_tokens(tokenizer.pad_token_id) == chosen
    assert tokenizer.eos_token == EOS
    assert len(tokenizer) == 3 + len(special)
    tokenizer.save_pretrained(tmp_path / "exported")
    assert tokenizer_facts(load_tokenizer(tmp_path / "exported")) == tokenizer_facts(tokenizer)


def test_pad_token_of_its_own_is_kept(tmp_path: Path) -> None:
    assert load_tokenizer(saved(tmp_path, ["<unk>", "[X]"], unk_token="<unk>", pad_token="[X]")).pad_token == "[X]"


def test_without_a_token_to_choose_it_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path, ["<|im_start|>"])
    with pytest.raises(ValueError, match="has no pad token apart from its EOS") as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)
    assert "set pad_token in its tokenizer_config.json" in str(caught.value)
    config: dict[str, Any] = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|im_start|>"}))
    assert load_tokenizer(directory).pad_token == "<|im_start|>"  # what the message asks for works


def test_facts_tell_tokenizers_with_several_templates_apart(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, ["<unk>"], unk_token="<unk>"))
    templates: list[Any] = [None, "a", {"default": "a", "tool_use": "b"}, {"default": "a", "tool_use": "c"}]
    digests = []
    for template in templates:
        tokenizer.chat_template = template
        digests.append(tokenizer_facts(tokenizer)["chat_template_digest"])
    assert len(set(digests)) == 4
    tokenizer.chat_template = {"tool_use": "c", "default": "a"}
    tokenizer.save_pretrained(tmp_path / "exported")
    assert tokenizer_facts(load_tokenizer(tmp_path / "exported"))["chat_template_digest"] == digests[-1]


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 3}, (2, 3)), ({"eos_token_id": [3, 2, 4]}, (2, 3, 4))],
)
def test_responses_end_with_the_eos_and_what_the_generation_config_names(
    tmp_path: Path, named: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, ["<unk>", "<|eot|>"], unk_token="<unk>"))
    if named is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(named))
    assert stop_token_ids(tmp_path, tokenizer) == expected


@pytest.mark.parametrize("written", [False, True])
def test_written_stop_tokens_are_what_hugging_face_generates_by(tmp_path: Path, written: bool) -> None:
    if written:
        GenerationConfig(bos_token_id=1, eos_token_id=2, do_sample=True, top_p=0.9).save_pretrained(tmp_path)
    write_stop_token_ids(tmp_path, [2, 7])
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config.eos_token_id == [2, 7]
    assert (config.bos_token_id, config.top_p) == ((1, 0.9) if written else (None, GenerationConfig().top_p))
