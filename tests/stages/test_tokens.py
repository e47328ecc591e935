"""Rows become tokens in the driver: once, with a report, and with an error before any rank starts."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlhf_core.config.pipeline import RunSettings
from rlhf_core.config.rl import PpoSettings, PtxSettings
from rlhf_core.config.supervised import DpoSettings, PrmSettings, RmSettings, SftSettings
from rlhf_core.config.training import ModelSource, OptimizerSettings, ScratchModel, TrainerSettings
from rlhf_core.data.errors import TokenError
from rlhf_core.data.token_cache import fetch_tokens
from rlhf_core.models.scratch import build_tokenizer
from rlhf_core.store.artifacts import fetch, publish
from rlhf_core.store.keys import stage_key
from rlhf_core.store.leases import acquire
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import EventLog
from stages.definition import StageContext
from stages.tokens import first_fill_rate, tokenise, tokenise_ptx

COMMON = {"optimizer": OptimizerSettings(lr=1.0), "batch_size": 2, "max_len": 32, "max_steps": 1}
SCRATCH = ScratchModel(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=16)
SFT = SftSettings(model=ModelSource(scratch=SCRATCH), **COMMON)
PRM = PrmSettings(placeholder_token="<|reserved_0|>", reward_tokens=("<|reserved_1|>", "<|reserved_2|>"), **COMMON)
PPO = PpoSettings.model_validate(
    {
        "optimizer": {"lr": 1.0},
        "algorithm": {"preset": "grpo"},
        "rollout": {"prompts": 1, "samples_per_prompt": 2, "max_new_tokens": 4, "max_prompt_len": 4},
        "reward": {"exact": 1.0},
        "steps": 1,
        "batch_size": 2,
    }
)
PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "44"}
RESPONSE = {"prompt": "1+2=", "response": "3"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(64)


@pytest.fixture
def context_of(tmp_path):
    """A stage's context over rows that are published here; each call has a scratch directory of its own."""
    store = Store(str(tmp_path / "store"))

    def make(stage, settings, rows, held_out=(), attempt="one"):
        files = tmp_path / f"rows-{attempt}"
        files.mkdir()
        for name, content in (("rows.jsonl", rows), ("eval.jsonl", held_out)):
            if content:
                (files / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        data = stage_key(stage="prepare-data", version=1, settings={"a": attempt}, inputs={}, data={}, code={})
        fields = {"stage": "prepare-data", "key": data.key, "key_source": data.source}
        manifest = publish(store, local_dir=files, manifest_fields=fields, lease=None)
        scratch = tmp_path / f"scratch-{attempt}"
        key = stage_key(stage=stage, version=1, settings={}, inputs={}, data={}, code={})
        return StageContext(
            node=stage,
            stage=stage,
            key=key.key,
            key_source=key.source,
            settings=settings,
            run=RunSettings(store=store.url),
            store=store,
            lease=acquire(store, stage, f"{attempt}-{stage}", {}, 600),
            scratch=scratch,
            inputs={"data": fetch(store, manifest, scratch / "inputs" / "data")},
            manifests={"data": manifest},
            events=EventLog(scratch / "events.jsonl"),
        )

    return make


def test_ranks_find_the_tokens_by_their_keys_and_the_artifact_has_the_report(context_of, tokenizer, tmp_path):
    context = context_of("rm", RmSettings(**COMMON), [PAIR, PAIR | {"chosen": "4" * 40}], [PAIR, PAIR | {"chosen": ""}])
    tokens = tokenise(context, tokenizer)
    tables = {split: fetch_tokens(context.store, key, tmp_path / "rank") for split, key in tokens.keys.items()}
    assert {split: len(table) for split, table in tables.items()} == {"train": 1, "eval": 1}
    chosen, rejected = tables["train"].item(0).samples
    # <s><|user|>1+2=<|end|><|assistant|> is 8 tokens, all context; then the response and its end are trained on.
    assert tokenizer.decode(chosen.ids) == "<s><|user|>1+2=<|end|><|assistant|>3<|end|>"
    assert np.flatnonzero(chosen.weights).tolist() == [8, 9]
    assert np.flatnonzero(rejected.weights).tolist() == [8, 9, 10]
    assert (tokens.counts["rows"], tokens.counts["items"], tokens.counts["dropped"]) == (2, 1, 1)
    assert tokens.counts["eval_items"] == 1
    report = json.loads((context.files / "data_report.json").read_text())
    assert report["train"]["dropped"]["longer than max_len (32 tokens)"]["items"] == 1
    assert report["eval"]["rows"] == 2
    assert (context.files / "plots" / "lengths.png").stat().st_size > 0
    # The UI shows what became of the held-out rows as well, and an example of what is trained on.
    for line in ("| longer than max_len (32 tokens) | 1 | 2 |", "| empty response | 1 | 2 |"):
        assert line in tokens.report
    assert tokens.report.count("**pairs") == 2
    assert "Held out: **pairs**" in tokens.report
    assert tokens.report.count("The first item") == 1
    assert "⟦3<|end|>⟧" in tokens.report


def test_the_same_rows_are_encoded_once_and_other_settings_are_not_taken_for_them(context_of, tokenizer, monkeypatch):
    first = tokenise(context_of("dpo", DpoSettings(**COMMON), [PAIR]), tokenizer)
    longer = DpoSettings(**{**COMMON, "max_len": 31})
    assert tokenise(context_of("dpo", longer, [PAIR], attempt="two"), tokenizer).keys != first.keys
    # A reward model's pairs may have margins, so that they are not those of DPO even where the rows are.
    assert tokenise(context_of("rm", RmSettings(**COMMON), [PAIR], attempt="rm"), tokenizer).keys != first.keys
    monkeypatch.setattr("rlhf_core.data.encode.Encoder.pairs", None)
    again = tokenise(context_of("dpo", DpoSettings(**COMMON), [PAIR], attempt="three"), tokenizer)
    assert again.keys == first.keys
    assert again.report == first.report


def test_the_rows_of_ptx_are_those_of_sft_where_the_settings_are(context_of, tokenizer, monkeypatch):
    rows = [RESPONSE, RESPONSE | {"response": "3" * 40}]
    tokens = tokenise(context_of("sft", SFT, rows), tokenizer)
    context = context_of("ppo", PPO, rows, attempt="ppo")
    assert tokenise_ptx(context, tokenizer) == ({}, {})
    ptx = replace(
        context,
        settings=PPO.model_copy(update={"ptx": PtxSettings(coef=0.5, max_len=SFT.max_len)}),
        inputs={"ptx": context.inputs["data"]},
        manifests={"ptx": context.manifests["data"]},
    )
    monkeypatch.setattr("rlhf_core.data.encode.Encoder.sft", None)
    keys, counts = tokenise_ptx(ptx, tokenizer)
    assert keys == {"ptx": tokens.keys["train"]}
    assert (counts["ptx_rows"], counts["ptx_items"]) == (2, 1)


@pytest.mark.parametrize(
    ("stage", "settings", "row", "message"),
    [
        ("sft", SFT, {"text": "3"}, "sft: data.sft, rows.jsonl: row 1: text.format chat needs a column response"),
        ("prm", PRM, {"prompt": "1+", "steps": ["3"], "labels": [None]}, "prm: data.steps, rows.jsonl: row 1: no step"),
        ("sft", SFT, RESPONSE | {"response": "3" * 40}, "sft: data.sft, rows.jsonl: data set sft: none of the 1 rows"),
    ],
)
def test_rows_that_cannot_be_used_are_named_in_one_line(context_of, tokenizer, stage, settings, row, message):
    with pytest.raises(TokenError) as caught:
        tokenise(context_of(stage, settings, [row]), tokenizer)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_fill_rate_is_that_of_the_packed_rows(context_of, tokenizer, tmp_path):
    settings = SFT.model_copy(update={"trainer": TrainerSettings(packing=True), "batch_size": 3})
    context = context_of("sft", settings, [RESPONSE, RESPONSE, RESPONSE])
    tokens = tokenise(context, tokenizer)
    # Three samples of 10 tokens fill a row of 32.
    assert tokens.counts["fill_rate"] == pytest.approx(30 / 32)
    table = fetch_tokens(context.store, tokens.keys["train"], tmp_path / "rank")
    assert first_fill_rate(table, settings.model_copy(update={"max_len": 25})) == pytest.approx(30 / 50)
