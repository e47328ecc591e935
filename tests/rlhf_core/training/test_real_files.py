"""Every real data file trains: from the file through rows and tokens to optimizer steps, on one rank.

The model is tiny and the tokenizer made here from the files' own text, so the loss falls within a few steps.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_core.config.data import DataSource
from rlhf_core.config.supervised import DpoSettings, KtoSettings, PrmSettings, RmSettings, SftSettings, TextSettings
from rlhf_core.config.training import ModelSource, OptimizerSettings, TrainerSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.loading import load_data
from rlhf_core.data.token_cache import cached_tokens
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.store.leases import acquire
from rlhf_core.store.store import Store
from rlhf_core.training import supervised_loop as loop
from rlhf_core.training.rank import Job

pytestmark = pytest.mark.engines

# Messages with tool calls written as JSON, since that is where files of tool use would lose them silently.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['tool_calls'] %}{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}{% endfor %}\
{% else %}{{ message['content'] }}{% endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|step|>", "<|right|>", "<|wrong|>")
SOLUTIONS = """\
import json

def load_rows(split):
    for line in open({path!r}, encoding="utf-8"):
        row = json.loads(line)
        solved = [row[m] for m in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")]
        right = [one["solution"] for one in solved if one["is_correct"]]
        wrong = [one["solution"] for one in solved if not one["is_correct"]]
        if {kind!r} == "pairs" and right and wrong:
            yield dict(prompt=row["question"], chosen=right[0], rejected=wrong[0])
        if {kind!r} == "labelled":
            yield dict(prompt=row["question"], response=solved[0]["solution"], label=solved[0]["is_correct"])
        if {kind!r} == "steps":
            steps = solved[0]["solution"].split("\\n")
            labels = [True] * (len(steps) - 1) + [solved[0]["is_correct"]]
            yield dict(prompt=row["question"], steps=steps, labels=labels)
"""
GSM8K = {"prompt": "question", "response": "answer"}
# (stage, file, fields of its data source)
FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("sft", "chat/alpaca_en_demo.json", {}),
    ("sft", "chat/glaive_toolcall_en_demo.json", {}),
    ("sft", "chat/v1_sft_demo.jsonl", {}),
    ("sft", "gsm8k/train.jsonl", {"columns": GSM8K}),
    ("sft", "gsm8k/test.jsonl", {"columns": GSM8K}),
    ("sft", "gsm8k/test_socratic.jsonl", {"columns": GSM8K}),
    ("rm", "chat/dpo_en_demo.json", {}),
    ("dpo", "chat/dpo_en_demo.json", {}),
    ("kto", "chat/kto_en_demo.json", {}),
    ("rm", "gsm8k/example_model_solutions.jsonl", {}),
    ("kto", "gsm8k/example_model_solutions.jsonl", {}),
    ("prm", "gsm8k/example_model_solutions.jsonl", {}),
]
KINDS = {"sft": "sft", "rm": "pairs", "dpo": "pairs", "kto": "labelled", "prm": "steps"}
TARGETS = {
    "sft": loop.SFT_TRAINER,
    "rm": loop.RM_TRAINER,
    "prm": loop.PRM_TRAINER,
    "dpo": loop.DPO_TRAINER,
    "kto": loop.KTO_TRAINER,
}
ROWS, STEPS = 96, 10


@pytest.fixture(scope="module")
def model(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of 2 layers, and a byte-level BPE tokenizer of 1,000 tokens from the files' text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = [(test_data / name).read_text(encoding="utf-8")[:200_000] for _, name, _ in FILES]
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    directory = tmp_path_factory.mktemp("real") / "model"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def settings_of(stage: str, model: str) -> Any:
    common: dict[str, Any] = {
        "model": ModelSource(path=model),
        "text": TextSettings(truncation="cut"),
        # Preferences are learned by heart here, which large steps undo for the rows of the steps before.
        "optimizer": OptimizerSettings(lr=5e-3 if stage == "sft" else 5e-4, schedule="constant"),
        "batch_size": 8,
        "max_len": 384,
        "max_steps": STEPS,
        "dtype": "float32",
        "trainer": TrainerSettings(micro_batch_size=2, packing=stage != "sft"),
    }
    if stage == "prm":
        return PrmSettings(placeholder_token="<|step|>", reward_tokens=("<|right|>", "<|wrong|>"), **common)
    return {"sft": SftSettings, "rm": RmSettings, "dpo": DpoSettings, "kto": KtoSettings}[stage](**common)


def source_of(stage: str, path: Path, fields: dict[str, Any], scratch: Path) -> DataSource:
    if path.name != "example_model_solutions.jsonl":
        return DataSource(path=str(path), max_samples=ROWS, **fields)
    loader = scratch / "solutions.py"
    loader.write_text(SOLUTIONS.format(path=str(path), kind=KINDS[stage]))
    return DataSource(path=str(loader), max_samples=ROWS, **fields)


@pytest.mark.parametrize(("stage", "file", "fields"), FILES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_real_file_trains(
    groups: Any, test_data: Path, model: str, tmp_path: Path, stage: str, file: str, fields: dict[str, Any]
) -> None:
    settings = settings_of(stage, model)
    rows = load_data(KINDS[stage], source_of(stage, test_data / file, fields, tmp_path)).rows
    encoder = Encoder(load_tokenizer(model), settings.text, settings.max_len)
    store, scratch = Store(str(tmp_path / "store")), tmp_path / "scratch"
    encode = {
        "sft": encoder.sft,
        "pairs": encoder.pairs,
        "labelled": encoder.labelled,
        "steps": lambda rows, into: encoder.steps(rows, settings, into=into),
    }[KINDS[stage]]
    cached = cached_tokens(store, "1" * 64, scratch / "tokens", lambda sink: encode(rows, into=sink).report)
    report, table = cached.report, cached.table
    assert report.rows == len(rows) == ROWS
    assert report.items == len(table) == report.rows - sum(one.items for one in report.dropped.values())
    samples = [sample for number in range(len(table)) for sample in table.item(number).samples]
    assert report.trained_tokens == sum(int((sample.weights > 0).sum()) for sample in samples) > 0
    assert report.tokens == sum(map(len, samples))
    assert max(map(len, samples)) <= settings.max_len
    assert "⟦" in report.example

    # The rows that are trained on are evaluated as well: what has to show is that the steps move the right way.
    lease = acquire(store, stage, "a" * 64, {"test": True}, 3600)
    keys = {"train": "1" * 64, "eval": "1" * 64}
    job = Job(stage, "a" * 64, settings, store.url, lease.n, str(scratch), {}, keys)
    done = groups[1].run("supervised", target=TARGETS[stage], job=job, train_steps=STEPS)[0]
    before, after = done["before"], done["after"]
    if stage == "kto":  # its loss moves with its estimate of the KL
        assert after["rewards/desirable"] > after["rewards/undesirable"]
    else:
        assert after["loss"] < before["loss"] * (0.9 if stage == "sft" else 1.0)


def test_the_weights_of_messages_are_those_of_the_file(test_data: Path, model: str) -> None:
    """v1_sft_demo.jsonl weights every assistant message; what they add up to is counted by hand from the file."""
    path = test_data / "chat" / "v1_sft_demo.jsonl"
    raw = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:ROWS]
    tokenizer = load_tokenizer(model)
    wanted = 0.0
    for row in raw:
        for message in row["messages"]:
            text = "".join(part["value"] for part in message["content"])
            if message["role"] == "assistant":
                wanted += message["loss_weight"] * (len(tokenizer(text)["input_ids"]) + 1)
    rows = load_data("sft", DataSource(path=str(path), max_samples=ROWS)).rows
    data = Encoder(tokenizer, TextSettings(), 100_000).sft(rows)
    assert sum(float(item.samples[0].weights.sum()) for item in data.items) == pytest.approx(wanted)
