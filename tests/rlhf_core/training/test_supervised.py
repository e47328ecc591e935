"""The trainers of all supervised stages as a stage has them: tokens and models from the store, on real ranks."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from rlhf_core.config.supervised import DpoSettings, KtoSettings, PrmSettings, RmSettings, SftSettings, TextSettings
from rlhf_core.config.training import LoraSettings, ModelSource, OptimizerSettings, ScratchModel, TrainerSettings
from rlhf_core.data.encode import Encoder, read_chat_template
from rlhf_core.data.token_cache import cached_tokens
from rlhf_core.models.export import merge_adapter
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.store.artifacts import publish
from rlhf_core.store.keys import canonical_json, sha256_text
from rlhf_core.store.leases import acquire
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.training import supervised_loop as loop
from rlhf_core.training.rank import Job, base_model_directory

pytestmark = pytest.mark.engines

SUMS = [(a, b) for a in range(1, 10, 2) for b in range(1, 10, 3)]  # 15 rows
HELD_OUT = 5
STEP_TOKENS = {"placeholder_token": "<|reserved_0|>", "reward_tokens": ("<|reserved_1|>", "<|reserved_2|>")}


def rows_of(stage: str) -> list[dict[str, Any]]:
    prompts = [f"{a}+{b}=" for a, b in SUMS]
    right, wrong = [str(a + b) for a, b in SUMS], [f"{a}{b}{a + b + 1}" for a, b in SUMS]
    columns: dict[str, dict[str, list[Any]]] = {
        "sft": {"response": [f"{p}{r}#{r}" for p, r in zip(prompts, right, strict=True)]},
        "rm": {"chosen": right, "rejected": wrong},
        "dpo": {"chosen": right, "rejected": wrong},
        "kto": {
            "response": [r if n % 2 else w for n, (r, w) in enumerate(zip(right, wrong, strict=True))],
            "label": [bool(n % 2) for n in range(len(SUMS))],
        },
        "prm": {
            "steps": [[f"{p}{r},", f"{w}#{w}"] for p, r, w in zip(prompts, right, wrong, strict=True)],
            "labels": [[True, n % 3 == 0] for n in range(len(SUMS))],
        },
    }
    named = {"prompt": prompts, **columns[stage]}
    return [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]


SETTINGS: dict[str, Callable[..., Any]] = {
    "sft": SftSettings,
    "rm": RmSettings,
    "prm": lambda **common: PrmSettings(**STEP_TOKENS, separator=",", **common),
    "dpo": lambda **common: DpoSettings(**{"beta": 0.5, "nll_coef": 0.1, **common}),
    "kto": lambda **common: KtoSettings(beta=0.5, undesirable_weight=0.7, **common),
}
TARGETS = {
    "sft": loop.SFT_TRAINER,
    "rm": loop.RM_TRAINER,
    "prm": loop.PRM_TRAINER,
    "dpo": loop.DPO_TRAINER,
    "kto": loop.KTO_TRAINER,
}
STAGES = list(TARGETS)
KTO_REWARDS = ("rewards/desirable", "rewards/undesirable")


def encoding(encoder: Encoder, stage: str, settings: Any, rows: list[dict[str, Any]]) -> Any:
    if stage == "prm":
        return lambda sink: encoder.steps(rows, settings, into=sink).report
    encode = {"sft": encoder.sft, "rm": encoder.pairs, "dpo": encoder.pairs, "kto": encoder.labelled}[stage]
    return lambda sink: encode(rows, into=sink).report


def publish_files(store: Store, stage: str, directory: Path) -> Manifest:
    source: dict[str, Any] = {"stage": stage, "directory": directory.name}
    fields = {"stage": stage, "key": sha256_text(canonical_json(source)), "key_source": source}
    return publish(store, local_dir=directory, manifest_fields=fields, lease=None)


@pytest.fixture
def job_of(tmp_path: Path, llama: str) -> Any:
    """The job of a stage's trainer: 10 training rows of different lengths, 5 held out; steps of 4."""
    made: list[Path] = []

    def make(stage: str, ranks: int, *, trainer: dict[str, Any] | None = None, **settings: Any) -> Job:
        root = tmp_path / f"{stage}-{len(made)}"
        made.append(root)
        store = Store(str(root / "store"))
        scratch = root / "scratch"
        scratch.mkdir(parents=True)
        common: dict[str, Any] = {
            "model": ModelSource(path=llama) if stage == "sft" else None,
            "optimizer": OptimizerSettings(lr=3e-3),
            "batch_size": 4,
            "max_len": 40,
            "max_steps": 8,
            "dtype": "float32",
            "trainer": TrainerSettings(**{"ranks": ranks, "micro_batch_size": 2, **(trainer or {})}),
        }
        own = SETTINGS[stage](**{**common, **settings})
        manifests = {}
        if stage != "sft":
            shutil.copytree(llama, root / "sft" / "model")
            manifests["model"] = publish_files(store, "sft", root / "sft")
        encoder = Encoder(load_tokenizer(llama), own.text, own.max_len)
        keys = {"train": "1" * 64, "eval": "2" * 64}
        for (_, key), rows in zip(keys.items(), (rows_of(stage)[HELD_OUT:], rows_of(stage)[:HELD_OUT]), strict=True):
            cached_tokens(store, key, scratch / "tokens", encoding(encoder, stage, own, rows))
        lease = acquire(store, stage, "a" * 64, {"test": True}, 3600)
        template = read_chat_template(own.text)
        return Job(stage, "a" * 64, own, store.url, lease.n, str(scratch), manifests, keys, template)

    return make


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_and_steps_do_not_depend_on_the_cut(groups: Any, job_of: Any, stage: str) -> None:
    """5 rows on 2 ranks want a fill row, which has no weight. Packed rows hold what else would be several.

    One rank evaluates all held-out rows in one call, two take one for 4 and one for the fifth.
    """
    cuts = [(1, {"micro_batch_size": 5}), (2, {"zero_stage": 2, "packing": True}), (2, {"zero_stage": 3})]
    one, *others = [
        groups[ranks].run("supervised", target=TARGETS[stage], job=job_of(stage, ranks, trainer=cut), train_steps=4)
        for ranks, cut in cuts
    ]
    passes = 2 if stage == "kto" else 1
    for ranks, calls in ((one, passes), *((two, 2 * passes) for two in others)):
        assert [rank[moment].pop("calls") for rank in ranks for moment in ("before", "after")] == [calls] * 2 * len(
            ranks
        )
    referred = len(SUMS) if stage in ("dpo", "kto") else 0
    assert one[0]["counts"] == {"total_steps": 8, "eval_rows": HELD_OUT, "reference_rows": referred}
    if stage == "dpo":  # policy and reference still agree: which reward is larger is a matter of the last bits
        for ranks in (one, *others):
            for rank in ranks:
                del rank["before"]["accuracy"], rank["steps"][0]["accuracy"]
    for two in others:
        assert two[0] == two[1]
        for moment in ("before", "after"):
            assert two[0][moment].keys() == one[0][moment].keys()
            assert two[0][moment] == pytest.approx(one[0][moment], rel=2e-4, abs=2e-5), moment
        for step, same in zip(two[0]["steps"], one[0]["steps"], strict=True):
            assert step == pytest.approx(same, rel=2e-4, abs=2e-5)
    assert learned(stage, one[0])


def learned(stage: str, done: dict[str, Any]) -> bool:
    """KTO's loss moves with its estimate of the KL; what has to part is the rewards of good and bad responses."""
    if stage != "kto":
        return done["after"]["loss"] < done["before"]["loss"]
    good, bad = ([step[name] for step in done["steps"][-3:] if name in step] for name in KTO_REWARDS)
    return sum(good) / len(good) > sum(bad) / len(bad)


@pytest.mark.parametrize("stage", STAGES)
def test_a_trainer_goes_on_from_the_store_to_the_bit(groups: Any, job_of: Any, stage: str) -> None:
    """3 steps of 4 rows end in the second epoch of 10 rows: the position is part of it, and so is the reference."""
    job = job_of(stage, 2, trainer={"packing": True})
    done = groups[2].run("trainer_resume", target=TARGETS[stage], job=job, before=3, after=3)
    for rank in done:
        assert rank["position"] == 12
        assert rank["resumed"] == rank["straight"]
        assert rank["resumed_digest"] == rank["straight_digest"]
    assert len(set(done[0]["straight"])) == 6
    # One copy for the ranks of a node, which is gone once all have loaded it.
    assert [rank["downloads"] for rank in done] == [1, 0]
    assert not list(Path(job.scratch).glob("load-*"))


@pytest.mark.parametrize(("stage", "zero_stage"), [("dpo", 0), ("dpo", 2), ("kto", 3)])
def test_a_trainer_goes_on_from_before_its_first_step(
    groups: Any, job_of: Any, llama_tied: str, stage: str, zero_stage: int
) -> None:
    """What is kept of a reference of its own is enough: the model in its place is not looked at again."""
    job = job_of(stage, 2, trainer={"zero_stage": zero_stage}, reference=ModelSource(path=llama_tied))
    done = groups[2].run("trainer_resume", target=TARGETS[stage], job=job, before=0, after=3)
    for rank in done:
        assert rank["resumed"] == rank["straight"]
        assert rank["resumed_digest"] == rank["straight_digest"]


def test_the_reference_is_the_model_that_training_starts_from(groups: Any, job_of: Any) -> None:
    """Before the first step policy and reference agree: DPO's loss is ln 2 and no reward is other than 0."""
    dpo = groups[1].run("supervised", target=TARGETS["dpo"], job=job_of("dpo", 1, nll_coef=0.0), train_steps=1)[0]
    assert dpo["before"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert dpo["before"]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    kto = groups[1].run("supervised", target=TARGETS["kto"], job=job_of("kto", 1), train_steps=3)[0]
    # 2 of the 5 held-out responses are good: 1 * sigmoid(0) each, and 0.7 * sigmoid(0) for the 3 bad ones.
    assert kto["before"]["loss"] == pytest.approx((2 * 0.5 + 3 * 0.35) / 5, abs=1e-5)
    assert kto["before"]["kl"] == pytest.approx(0, abs=1e-5)
    assert kto["steps"][2]["kl"] > 0


def test_a_reference_of_its_own(groups: Any, job_of: Any, llama_tied: str) -> None:
    job = job_of("dpo", 1, nll_coef=0.0, reference=ModelSource(path=llama_tied))
    before = groups[1].run("supervised", target=TARGETS["dpo"], job=job, train_steps=0)[0]["before"]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(d) for d in (str(job.input_path("model") / "model"), llama_tied)
    )
    table, rewards = job.token_tables()["eval"], []
    for number in range(len(table)):
        chosen = table.item(number).samples[0]
        ids = torch.tensor(chosen.ids)[None].long()
        start = int((chosen.weights > 0).argmax())
        sums = []
        for model in (policy, reference):
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[start - 1 :]
            sums.append(logprobs.sum().item())
        rewards.append(0.5 * (sums[0] - sums[1]))
    assert before["rewards/chosen"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-4)


def test_two_models_from_scratch_are_two(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 16, "max_position": 16}
    one, other = (
        base_model_directory(ModelSource(scratch=ScratchModel(**small, seed=seed)), str(tmp_path), 0) for seed in (0, 1)
    )
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_a_reward_models_export_scores_as_it_was_evaluated(
    groups: Any, job_of: Any, tmp_path: Path, lora: LoraSettings | None
) -> None:
    """Hugging Face's own class, on single unpadded rows, gives the held-out scores whose mean and std are recorded."""
    job, out = job_of("rm", 1, lora=lora), tmp_path / "export"
    done = groups[1].run("supervised", target=TARGETS["rm"], job=job, train_steps=6, export=str(out))[0]
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    table = job.token_tables()["eval"]
    with torch.no_grad():
        scores = torch.tensor(
            [
                model(torch.tensor(sample.ids)[None].long()).logits.item()
                for number in range(len(table))
                for sample in table.item(number).samples
            ]
        ).double()
    config = json.loads((out / "config.json").read_text())
    assert config["value_head_prefix"] == "score"
    assert config["mean"] == pytest.approx(scores.mean().item(), rel=1e-4, abs=1e-4)
    assert config["std"] == pytest.approx(scores.std(correction=0).item(), rel=1e-4)
    assert done["facts"]["head"] == {"name": "score", "mean": config["mean"], "std": config["std"]}
    chosen, rejected = scores.view(-1, 2).unbind(1)
    assert done["after"]["accuracy"] == pytest.approx((chosen > rejected).double().mean().item())
    assert AutoTokenizer.from_pretrained(out).chat_template


@pytest.mark.parametrize(("stage", "lora"), [("sft", None), ("dpo", LoraSettings(rank=2))])
def test_an_exported_policy_stops_where_its_template_ends_a_turn(
    groups: Any, job_of: Any, tmp_path: Path, llama: str, stage: str, lora: LoraSettings | None
) -> None:
    """As for a base model whose EOS its chat template does not write, and so does one merged from the adapter. Ranks
    may be where the template's file is not."""
    template, out = tmp_path / "template.jinja", tmp_path / "export"
    template.write_text("{% for m in messages %}{{ m.content }}<pad>{% endfor %}")
    job = job_of(stage, 1, text=TextSettings(chat_template=str(template)), lora=lora)
    template.unlink()
    done = groups[1].run("supervised", target=TARGETS[stage], job=job, train_steps=1, export=str(out))[0]
    tokenizer, config = AutoTokenizer.from_pretrained(out), GenerationConfig.from_pretrained(out)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<pad>")]
    assert config.eos_token_id == done["facts"]["stop_token_ids"] == stops
    assert tokenizer.eos_token != "<pad>"
    if lora is not None:
        merge_adapter(llama, out / "adapter", tmp_path / "merged", base_digest=None)
        assert GenerationConfig.from_pretrained(tmp_path / "merged").to_dict() == config.to_dict()


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_with_a_moving_average_what_is_evaluated_is_what_is_exported(
    groups: Any, job_of: Any, tmp_path: Path, zero_stage: int
) -> None:
    """The average's loss under Hugging Face; and training that is looked at goes on as one that is not."""

    def run(**settings: Any) -> Any:
        job = job_of("sft", 2, trainer={"zero_stage": zero_stage}, **settings)
        arguments = {"target": TARGETS["sft"], "job": job, "train_steps": 4, "evaluate_between": True}
        return job, groups[2].run("supervised", **arguments, export=str(tmp_path / str(len(settings))))[0]

    _, plain = run()
    job, averaged = run(ema_decay=0.5)
    assert [step["loss"] for step in averaged["steps"]] == [step["loss"] for step in plain["steps"]]
    assert averaged["after"]["loss"] != plain["after"]["loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "1")
    total = count = 0.0
    table = job.token_tables()["eval"]
    for number in range(len(table)):
        sample = table.item(number).samples[0]
        labels = torch.tensor(sample.ids).long().masked_fill(torch.tensor(sample.weights) == 0, -100)
        trained = int((labels >= 0).sum())
        with torch.no_grad():
            loss = model(input_ids=torch.tensor(sample.ids)[None].long(), labels=labels[None]).loss.item()
        total, count = total + loss * trained, count + trained
    assert averaged["after"]["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_train_and_leave_the_rest_alone(
    groups: Any, job_of: Any, tmp_path: Path, llama: str, stage: str
) -> None:
    job, out = job_of(stage, 2, lora=LoraSettings(rank=4), optimizer=OptimizerSettings(lr=1e-2)), tmp_path / "export"
    done = groups[2].run("supervised", target=TARGETS[stage], job=job, train_steps=8, export=str(out))[0]
    assert learned(stage, done)
    auto = AutoModelForSequenceClassification if stage == "rm" else AutoModelForCausalLM
    trained, base = auto.from_pretrained(out).state_dict(), AutoModelForCausalLM.from_pretrained(llama).state_dict()
    moved = {name for name, tensor in trained.items() if name not in base or not torch.equal(tensor, base[name])}
    assert "model.embed_tokens.weight" not in moved
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    # The base as the user knows it, not the copy that this attempt had.
    base_name = llama if stage == "sft" else f"sft/{job.manifests['model'].key}"
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == base_name
    assert json.loads((out / "adapter" / "base.json").read_text())["path"] == base_name


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, llama: str) -> str:
    """A mixture of experts with the small Llama's tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "mixture"
    shutil.copytree(llama, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_a_mixture_of_experts_trains_with_its_balance(groups: Any, job_of: Any, mixture: str, experts: str) -> None:
    """Loss and balance add up, with each kernel of the experts."""
    trainer = {"experts_implementation": experts}
    job = job_of("sft", 1, model=ModelSource(path=mixture), aux_loss_coef=0.5, trainer=trainer)
    done = groups[1].run("supervised", target=TARGETS["sft"], job=job, train_steps=8)[0]
    for step in done["steps"]:
        assert step["loss"] == pytest.approx(step["nll"] + 0.5 * step["aux"], rel=1e-5)
    assert done["after"]["nll"] < done["before"]["nll"]
