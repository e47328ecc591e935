"""Chat templates as models ship them (from the installed trl), and small tokenizers that know their special tokens."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Written from its definition: every message between <|im_start|>role and <|im_end|>.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Written from Mistral's documentation of the instruct format, not a shipped template:
# <s>[INST] Instruction [/INST] Model answer</s>[INST] Follow-up instruction [/INST]
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% endfor %}"
)

_SPECIAL = (
    "<s>",
    "</s>",
    "<pad>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|end|>",
    "<turn|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|return|>",
    "<|step|>",
)
# "<think>" and "<tool_call>" are tokens of Qwen that are not special.
_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_CORPUS = [
    "Hello, how are you today? I am fine, thank you.\n\nThe answer is 42.\n",
    "system user assistant model tool\n\n\nStep 1: 3 + 4 = 7.\nStep 2: 7 + 5 = 12.\n### The answer is 12\n",
]


def build_tokenizer(
    bos: str | None, eos: str, adds_bos: bool = False, trim_offsets: bool = False, pattern: str = r" ?\S+|\s+"
) -> Any:
    """A byte-level BPE tokenizer with the templates' special tokens, in which "\\n\\n" is one token.

    trim_offsets: leave white space out of the offsets, as GPT-2's tokenizer does. pattern: no token reaches over the
    border of what this finds.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(_CORPUS, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ADDED])
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if adds_bos:
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]))
    core.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token="<pad>")


def trl_template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl is a dev dependency; install the extra `dev`"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], "chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


# A template of trl by its name, with the BOS and EOS of its models.
_SHIPPED = {
    **dict.fromkeys(("qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "qwen3_5_think"), (None, "<|im_end|>")),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2", "llama3_training"), ("<|begin_of_text|>", "<|eot_id|>")),
    **dict.fromkeys(("gemma", "gemma_training"), ("<bos>", "<end_of_turn>")),
    **dict.fromkeys(("phi3", "phi3_training"), ("<s>", "</s>")),
    "gemma4_v2": ("<bos>", "<turn|>"),
    "gptoss": (None, "<|return|>"),
}
_WRITTEN = {"chatml": (CHATML, None, "<|im_end|>"), "mistral": (MISTRAL, "<s>", "</s>")}


@pytest.fixture(scope="session")
def model_tokenizer() -> Callable[..., Any]:
    """(name, adds_bos=False) -> a tokenizer with that model's template, BOS and EOS."""
    built: dict[tuple[str, bool], Any] = {}

    def get(name: str, adds_bos: bool = False) -> Any:
        if (name, adds_bos) not in built:
            template, bos, eos = _WRITTEN[name] if name in _WRITTEN else (trl_template(name), *_SHIPPED[name])
            tokenizer = build_tokenizer(bos, eos, adds_bos)
            tokenizer.chat_template = template
            built[name, adds_bos] = tokenizer
        return built[name, adds_bos]

    return get


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return build_tokenizer
