"""RLVR on GSM8K: a small model after a short SFT on the answer form, sampled by vLLM, rewarded by math-verify.

SFT teaches an answer of its own to each question: a right one, a wrong one, none, one that no verifier finishes, or
right and wrong ones by turns. So every kind occurs in the rollouts. A reward function of weight 0 writes down what was
sampled, and the metrics have to be what this file reads in those texts.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.models.scratch import CHAT_TEMPLATE
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.store import Store
from stages.plan import plan_pipeline

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

QUESTIONS, SAMPLES, STEPS = 8, 4, 2
ENDLESS = r"\boxed{9^{9^{9}}}"  # a number of 369 million digits
RECORD = """
import json, os
def reward_func(completion, label):
    line = json.dumps([completion, label]) + "\\n"
    file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
    return 0.0
"""


def answers(number: int, right: int) -> tuple[str, str]:
    """What SFT teaches as the answers to a question."""
    good, bad = f"#### {right}", f"#### {right + 1}"
    taught = {0: (good, good), 1: (bad, bad), 2: ("#### I do not know", "#### I do not know"), 3: (ENDLESS, ENDLESS)}
    return taught.get(number, (good, bad))


Kind = Literal["right", "wrong", "unparsable", "timeout"]


def read(completion: str, label: str) -> Kind:
    """Of a text with one number or none, whatever stands around it."""
    if "9^{9^{9}}" in completion:
        return "timeout"
    numbers = re.findall(r"\d+", completion)
    if not numbers:
        return "unparsable"
    assert len(numbers) == 1, completion
    return "right" if int(numbers[0]) == int(label.split("####")[1].replace(",", "")) else "wrong"


def short_rows(path: Path) -> list[dict[str, str]]:
    """Those with the shortest questions, which a small model learns in little time."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(rows, key=lambda row: len(row["question"]))[:QUESTIONS]


def write_model(folder: Path, texts: list[str]) -> Path:
    """A Llama with a token for each character of the texts."""
    special = ["<pad>", "<s>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>"]
    words = [*special, *sorted(set("".join(texts)))]
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=special[4:],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pipeline(folder: Path, gsm8k: Path) -> dict[str, Any]:
    columns = {"prompt": "question", "label": "answer"}
    trainer = {"ranks": 1, "micro_batch_size": 16, "save_steps": None}
    return {
        "run": {"store": f"{folder}/store", "scratch": f"{folder}/scratch"},
        "data": {
            "sft": {"path": f"{folder}/sft.jsonl"},
            "prompts": {"path": f"{folder}/prompts.jsonl", "columns": columns},
            "eval": {"path": f"{gsm8k}/test.jsonl", "max_samples": 4, "columns": columns},
        },
        "sft": {
            "model": {"path": f"{folder}/model"},
            "optimizer": {"lr": 3e-3},
            "batch_size": 16,
            "max_len": 128,
            "max_steps": 120,
            "dtype": "float32",
            "trainer": trainer,
        },
        "ppo": {
            "algorithm": {"preset": "grpo", "kl": {"coef": 0.0}},
            "reward": {
                "math": 1.0,
                "functions": [{"path": f"{folder}/record.py", "name": "record", "weight": 0.0}],
                "sandbox": {"timeout_s": 4.0},
            },
            "rollout": {
                "prompts": QUESTIONS,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": 24,
                "max_prompt_len": 400,
                "temperature": 0.5,
            },
            "batch_size": QUESTIONS * SAMPLES,
            "steps": STEPS,
            "optimizer": {"lr": 1e-4, "schedule": "constant", "warmup_ratio": 0.0},
            "dtype": "float32",
            "sampler": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, "kv_cache_gib": 0.125},
            "trainer": trainer,
        },
    }


def run_stages(folder: Path, given: dict[str, Any]) -> Path:
    """All of them by their drivers; the last one's artifact."""
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(given))
    settings = load_pipeline(folder / "pipeline.yaml")
    store = Store(settings.run.store)
    made: dict[str, Any] = {}
    for planned in plan_pipeline(settings):
        spec = {
            "stage": planned.stage.name,
            "node": planned.node,
            "settings": planned.settings.model_dump(mode="json"),
            "key": planned.key.key,
            "key_source": planned.key.source,
            "inputs": {name: made[source].model_dump(mode="json") for name, source in planned.inputs.items()},
            "run": settings.run.model_dump(mode="json"),
            "scratch": f"{folder}/scratch/{planned.node}",
        }
        path = folder / f"{planned.node}.json"
        path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", planned.stage.module, "--spec", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        made[planned.node] = read_manifest(store, planned.stage.name, planned.key.key)
    return fetch(store, made["ppo"], folder / "out")


def test_right_wrong_unparsable_and_timed_out_answers_are_counted(test_data: Path, tmp_path: Path) -> None:
    gsm8k = test_data / "gsm8k"
    rows = short_rows(gsm8k / "train.jsonl")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = [
        {"prompt": row["question"], "response": answer}
        for number, row in enumerate(rows)
        for answer in answers(number, int(row["answer"].split("####")[1]))
    ]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    (tmp_path / "record.py").write_text(RECORD.format(path=str(tmp_path / "sampled.jsonl")))
    write_model(tmp_path / "model", [text for row in taught for text in row.values()] + ["0123456789"])

    artifact = run_stages(tmp_path, pipeline(tmp_path, gsm8k))
    metrics = [json.loads(line) for line in (artifact / "metrics.jsonl").read_text().splitlines()]
    trained = [one for one in metrics if one["phase"] == "train"]
    sampled = [json.loads(line) for line in (tmp_path / "sampled.jsonl").read_text().splitlines()]
    each = QUESTIONS * SAMPLES
    assert (len(trained), len(sampled)) == (STEPS, STEPS * each)
    for step, found in enumerate(trained):
        # Every question is drawn once a step: a label is a group.
        kinds = [(read(*one), one[1]) for one in sampled[step * each : (step + 1) * each]]
        counts = Counter(kind for kind, _ in kinds)
        dropped = {label for kind, label in kinds if kind == "timeout"}
        kept = Counter(kind for kind, label in kinds if label not in dropped)
        assert set(counts) == {"right", "wrong", "unparsable", "timeout"}
        assert found["reward/math/failed/timeout"] == found["reward/failed"] == counts["timeout"]
        assert found["reward/dropped_groups"] == len(dropped)
        assert found["reward/math/unparsable"] * (each - counts["timeout"]) == pytest.approx(counts["unparsable"])
        assert found["reward/math"] * kept.total() == pytest.approx(kept["right"])
        assert found["reward"] == found["reward/math"]
        # Of a question with right and wrong answers there is something to learn.
        assert found["policy/grad_norm"] > 0
