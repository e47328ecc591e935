"""A small Llama from scratch for the demo and the tests: a Hugging Face directory with its own tokenizer and template.

One token a character; the vocabulary holds what the arithmetic task (rlhf_core/data/arithmetic.py) needs, six special
tokens and reserved ones up to 32, so that every id of the model's head is a token. BOS is written by the chat template
and by nothing else: `tokenizer(text)` adds no special token, and a rendered conversation has exactly one BOS.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_core.models.size import VOCABULARY_SIZE

BOS = "<s>"
END_OF_TURN = "<|end|>"  # ends every turn; the EOS of generation
PAD = "<pad>"
UNKNOWN = "<unk>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

CHARACTERS = "0123456789+=,#"
_SPECIAL = (PAD, BOS, END_OF_TURN, UNKNOWN, USER, ASSISTANT)  # the first ids, in this order

# <|user|>3+4=<|end|><|assistant|>3+4=7#7<|end|>, after one BOS. What `generation` encloses is what SFT trains on: the
# answer and the token that ends it.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<|user|>' + message['content'] + '<|end|>' -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' -}}
{%- generation -%}
{{- message['content'] + '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- raise_exception("role '" + message['role'] + "' is unknown to this template; use 'user' or 'assistant'") -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def write_scratch_model(
    dest: str | Path,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate_size: int,
    max_position: int,
    seed: int,
    dtype: str = "float32",
    tie_embeddings: bool = False,
) -> Path:
    """Write a randomly initialised LlamaForCausalLM, its tokenizer and its chat template; returns dest as a Path.

    The same arguments give the same bytes. The caller's random state is left as it was.

    Args:
        dest: a directory that does not exist, or is empty.
        max_position: longest sequence in tokens, also the tokenizer's model_max_length.
        dtype: "float32", "bfloat16" or "float16": the dtype of the saved weights, drawn in float32 and rounded.

    Raises ValueError for sizes that do not divide or an unknown dtype, FileExistsError where dest holds files.
    """
    dest = Path(dest)
    if dest.exists() and any(dest.iterdir()):
        raise FileExistsError(f"{dest} is not empty; give a new or an empty directory")
    if hidden_size % (2 * heads):
        raise ValueError(
            f"hidden_size {hidden_size} with {heads} heads: rotary embeddings want an even, whole head size; "
            f"make hidden_size a multiple of {2 * heads}"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} kv_heads; make heads a multiple of kv_heads")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise ValueError(f"dtype is {dtype!r}; give one of {', '.join(dtypes)}")

    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=_SPECIAL.index(BOS),
        eos_token_id=_SPECIAL.index(END_OF_TURN),
        pad_token_id=_SPECIAL.index(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=_SPECIAL.index(BOS),
        eos_token_id=_SPECIAL.index(END_OF_TURN),
        pad_token_id=_SPECIAL.index(PAD),
        do_sample=True,
    )
    model.to(dtypes[dtype])  # pyright: ignore[reportArgumentType]
    model.save_pretrained(dest)
    build_tokenizer(max_position).save_pretrained(dest)
    return dest


def build_tokenizer(max_position: int) -> PreTrainedTokenizerFast:
    """The character tokenizer with its chat template. A character outside the vocabulary becomes `<unk>`."""
    reserved = [f"<|reserved_{i}|>" for i in range(VOCABULARY_SIZE - len(_SPECIAL) - len(CHARACTERS))]
    words = [*_SPECIAL, *CHARACTERS, *reserved]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, *reserved],
        model_max_length=max_position,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
