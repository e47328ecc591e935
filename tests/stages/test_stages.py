"""Every supervised stage by its driver, small, and PPO with the process reward model: what the artifacts hold."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from logged_metrics import check_logged

from rlhf_core.config.pipeline import load_pipeline
from rlhf_core.store.artifacts import fetch, read_manifest
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.tracking.events import read_events
from stages.plan import plan_pipeline

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

STAGE = (
    "optimizer: {lr: 1.0e-3}, batch_size: 16, max_len: 48, max_steps: 4, eval_steps: 2, dtype: float32, "
    "trainer: {ranks: 1, micro_batch_size: 8}"
)
SCRATCH = "{hidden_size: 64, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64, max_position: 64}"
SMALL = [
    "data.sft.arithmetic={rows: 64, eval_rows: 8}",
    "data.pairs.arithmetic={rows: 32, eval_rows: 8}",
    "data.steps.arithmetic={rows: 32, eval_rows: 8}",
    "data.labelled={arithmetic: {rows: 32, eval_rows: 8}}",
    "data.prompts.arithmetic={rows: 16}",
    "data.eval={sources: [{arithmetic: {rows: 5}, label: sums}, {arithmetic: {rows: 3, seed: 1}, label: more.sums}]}",
    f"sft={{{STAGE}, model: {{scratch: {SCRATCH}}}}}",
    f"rm={{{STAGE}, lora: {{rank: 2}}}}",
    f"prm={{{STAGE}, placeholder_token: <|reserved_0|>, reward_tokens: [<|reserved_1|>, <|reserved_2|>],"
    ' separator: ","}',
    f"dpo={{{STAGE}, lora: {{rank: 2}}}}",
    f"kto={{{STAGE}}}",
    "ppo.policy=dpo",
    "ppo.reward={prm: 0.2, exact: 1.0}",
    "ppo.rollout={prompts: 4, samples_per_prompt: 2, max_new_tokens: 16, max_prompt_len: 24}",
    "ppo.batch_size=8",
    "ppo.steps=2",
    "ppo.critic.warmup_steps=1",
    "ppo.trainer={ranks: 1, micro_batch_size: 8, save_steps: 2}",
    "ppo.best_metric=exact_match/more.sums",
    "evaluate.evaluation={samples_per_prompt: 2, verifier: math, sandbox: {workers: 1}}",
]


class Runs:
    """Stages run one after the other, each once, by `python -m stages.<name> --spec FILE`."""

    def __init__(self, project: Path, folder: Path):
        self.folder = folder
        overrides = [*SMALL, f"run.store={folder}/store", f"run.scratch={folder}/scratch"]
        self.settings = load_pipeline(project / "deployments" / "pipelines" / "demo.yaml", overrides)
        self.store = Store(self.settings.run.store)
        self.plan = {planned.node: planned for planned in plan_pipeline(self.settings)}

    def manifest(self, node: str) -> Manifest:
        planned = self.plan[node]
        found = read_manifest(self.store, planned.stage.name, planned.key.key)
        return found or self._run(node)

    def files(self, node: str) -> Path:
        return fetch(self.store, self.manifest(node), self.folder / "out" / node)

    def summary(self, node: str) -> str:
        events = read_events(self.folder / "scratch" / node / "events.jsonl")
        return next(event["markdown"] for event in events if event["type"] == "summary")

    def _run(self, node: str) -> Manifest:
        planned = self.plan[node]
        spec: dict[str, Any] = {
            "stage": planned.stage.name,
            "node": node,
            "settings": planned.settings.model_dump(mode="json"),
            "key": planned.key.key,
            "key_source": planned.key.source,
            "inputs": {name: self.manifest(source).model_dump(mode="json") for name, source in planned.inputs.items()},
            "run": self.settings.run.model_dump(mode="json"),
            "scratch": f"{self.folder}/scratch/{node}",
        }
        path = self.folder / f"{node}.json"
        path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", planned.stage.module, "--spec", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        made = read_manifest(self.store, planned.stage.name, planned.key.key)
        assert made is not None
        return made


@pytest.fixture(scope="module")
def runs(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(project, tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize(
    ("node", "plots", "metrics"),
    [
        ("sft", set(), {"eval/nll"}),
        ("rm", {"accuracy"}, {"eval/accuracy", "eval/score"}),
        ("prm", {"accuracy", "calibration"}, {"eval/accuracy", "eval/calibration_error", "eval/step accuracy/1"}),
        ("dpo", {"accuracy", "rewards"}, {"eval/accuracy", "eval/margin", "eval/rewards/chosen"}),
        ("kto", {"rewards", "kl"}, {"eval/rewards/desirable", "eval/rewards/undesirable", "eval/kl"}),
    ],
)
def test_a_stage_leaves_model_metrics_plots_and_the_report_of_its_data(
    runs: Runs, node: str, plots: set[str], metrics: set[str]
):
    manifest, files = runs.manifest(node), runs.files(node)
    assert {path.stem for path in (files / "plots").iterdir()} == {"loss", "lengths", *plots}
    assert metrics <= manifest.metrics.keys()
    assert manifest.metrics["total_steps"] == 4
    assert manifest.metrics["eval_items"] == 8
    report = json.loads((files / "data_report.json").read_text())
    assert report["train"]["items"] == manifest.metrics["items"] > 0
    assert "⟦" in runs.summary(node)
    assert (files / "model" / "model.safetensors").exists()


def test_the_manifest_says_what_whoever_uses_the_model_has_to_know(runs: Runs):
    reward, process, policy = (runs.manifest(node).model or {} for node in ("rm", "prm", "dpo"))
    assert reward["head"]["name"] == "score"
    assert reward["head"]["std"] > 0
    assert process["head"] == {
        "name": "process_reward",
        "placeholder_token": "<|reserved_0|>",
        "reward_tokens": ["<|reserved_1|>", "<|reserved_2|>"],
        "separator": ",",
        "labels": "hard",
    }
    assert policy["lora"] == {"rank": 2, "alpha": 16.0, "base_digest": runs.manifest("sft").content_digest}


def test_ppo_is_rewarded_by_a_process_reward_model_without_a_reward_model(runs: Runs):
    manifest = runs.manifest("ppo")
    assert set(manifest.inputs) == {"policy", "process", "prompts", "eval"}
    assert {"reward/prm/last", "reward/exact/last"} <= manifest.metrics.keys()
    assert "reward/rm/last" not in manifest.metrics
    lines = (runs.files("ppo") / "metrics.jsonl").read_text().splitlines()
    assert runs.settings.ppo is not None
    check_logged(runs.settings.ppo, map(json.loads, lines), sources=["sums", "more.sums"])
    samples = [json.loads(line) for line in (runs.files("ppo") / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        right = sample["response"].split("#")[1:] == [sample["label"]]
        verdict = min(sample["step_scores"], default=0.0)
        assert sample["reward"] == pytest.approx(0.2 * verdict + right, abs=1e-6)


def test_every_policy_is_evaluated_greedily_and_sampled_of_all_prompts_and_by_source(runs: Runs):
    metrics = runs.manifest("evaluate").metrics
    rows = [json.loads(line) for line in (runs.files("evaluate") / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == metrics["prompts"] == 8
    for policy in ("sft", "dpo", "kto", "ppo"):
        found = {name.removesuffix(f"/{policy}"): value for name, value in metrics.items() if name.endswith(policy)}
        assert found["exact_match"] == sum(row[f"{policy} exact"] for row in rows) / 8
        assert found["math_match"] == sum(row[f"{policy} math"] for row in rows) / 8
        for name in ("exact_match", "math_match", "mean@2", "majority@2", "pass@1", "pass@2", "truncated_sampled"):
            assert found[name] == pytest.approx((5 * found[f"{name}/sums"] + 3 * found[f"{name}/more.sums"]) / 8)
        assert 0 <= found["mean@2"] == found["pass@1"] <= found["pass@2"]
        assert found["response_tokens_greedy"] <= 24
    assert "| `pass@2` |" in runs.summary("evaluate")
    assert "gain" in metrics
