"""Jobs of RL's trainer for its tests: artifacts in a store, rows as tokens, trajectories as a sampler gives them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from rlhf_core.config.rl import PpoSettings
from rlhf_core.config.supervised import TextSettings
from rlhf_core.data.encode import Encoder
from rlhf_core.data.token_cache import cached_tokens
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.rollout.trajectory import Trajectory, VersionSpan
from rlhf_core.store.artifacts import publish
from rlhf_core.store.keys import canonical_json, sha256_text
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store
from rlhf_core.training.rank import Job

PLACEHOLDER, RIGHT, WRONG = 20, 21, 22  # reserved tokens of the scratch model's vocabulary
UP = "model.layers.0.mlp.up_proj.weight"
# Where a gradient is near 0 eps keeps updates smooth, so that runs that round otherwise stay near one another.
OPTIMIZER = {"lr": 1e-2, "eps": 1e-2, "schedule": "constant", "warmup_ratio": 0.0}
PTX = {"coef": 0.5, "batch_size": 3, "max_len": 32, "text": {"format": "template", "input_template": "{}="}}


def published(store: Store, stage: str, model: str, directory: Path) -> Manifest:
    shutil.copytree(model, directory / "model")
    source = {"stage": stage}
    fields = {"stage": stage, "key": sha256_text(canonical_json(source)), "key_source": source}
    return publish(store, local_dir=directory, manifest_fields=fields, lease=None)


def process_model(base: str, directory: Path) -> str:
    """A process reward model of which steps end at commas, with weights of its own."""
    made = Path(shutil.copytree(base, directory))
    weights = load_file(made / "model.safetensors")
    save_file({**weights, UP: 0.5 * weights[UP]}, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    tokens = {"placeholder": PLACEHOLDER, "verdicts": [RIGHT, WRONG], "separator": ",", "template": None}
    (made / "config.json").write_text(json.dumps(config | {"process_reward": tokens}))
    return str(made)


def rollout(trajectories: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """The same trajectories as the sampler gives them: 7 of them, in groups of two and one alone."""
    return [
        Trajectory(
            prompt_ids=t["prompt_ids"],
            response_ids=t["response_ids"],
            action_mask=t["action_mask"],
            sampler_logprobs=t["logprobs"],
            version_spans=(VersionSpan(0, 0, len(t["response_ids"])),),
            group_id=number // 2,
            prompt_id=0,
            sample_id=number,
            finish_reason="stop",
        )
        for number, t in enumerate(trajectories[:7])
    ]


def rollout_job(directory: Path, models: Mapping[str, str], trainer: Mapping[str, Any], **settings: Any) -> Job:
    """A run on rollouts of up to 8 trajectories in steps of 4. models: input -> model directory."""
    directory.mkdir()
    store = Store(str(directory / "store"))
    stages = {"policy": "sft", "reward": "rm", "process": "prm"}
    manifests = {name: published(store, stages[name], model, directory / name) for name, model in models.items()}
    made = PpoSettings.model_validate(
        {
            "optimizer": OPTIMIZER,
            "rollout": {"prompts": 4, "samples_per_prompt": 2, "max_new_tokens": 16, "max_prompt_len": 16},
            "reward": {"exact": 1.0},
            "steps": 5,
            "batch_size": 4,
            "dtype": "float32",
            "sampler": {"max_model_len": 64, "dtype": "float32"},
            "trainer": {"micro_batch_size": 2, **trainer},
            **settings,
        }
    )
    tokens = {}
    if made.ptx is not None:
        tokens = {"ptx": "5" * 64}
        encoder = Encoder(load_tokenizer(Path(models["policy"])), TextSettings(**PTX["text"]), PTX["max_len"])
        rows = [{"prompt": f"{n}+{n}", "response": str(2 * n)} for n in range(7)]
        cached_tokens(store, tokens["ptx"], directory / "tokens", lambda sink: encoder.sft(rows, into=sink).report)
    return Job("ppo", "e" * 64, made, store.url, 1, str(directory), manifests, tokens)
