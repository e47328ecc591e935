"""OpenRLHF command lines for tests: what each command cannot do without, and a value for each of its flags."""

from collections.abc import Iterable

from flows.openrlhf.flags import COMMANDS, Flag
from flows.openrlhf.importing import Imported, import_command
from flows.openrlhf.shell import CommandLine
from flows.openrlhf.spellings import spellings

_SUPERVISED = {"model.model_name_or_path": ["org/model"], "data.dataset": ["org/rows"]}
NEEDED: dict[str, dict[str, list[str]]] = {
    "train_sft": _SUPERVISED,
    "train_rm": _SUPERVISED,
    "train_dpo": _SUPERVISED,
    "train_kto": _SUPERVISED,
    "train_prm": {**_SUPERVISED, "data.placeholder_token": ["ки"]},
    "train_ppo_ray": {
        "actor.model_name_or_path": ["org/model"],
        "data.prompt_dataset": ["org/prompts"],
        "reward.remote_url": ["http://10.0.0.5:5000/get_reward"],
        "rollout.n_samples_per_prompt": ["4"],  # what group baselines and filters need
    },
}
_VALUES = {
    "actor.dual_clip": ["3"],
    "adam.eps": ["1e-6"],
    "algo.advantage.estimator": ["reinforce"],
    "algo.advantage.is_correction_threshold": ["0.4", "4"],
    "ckpt.max_num": ["5"],
    "ckpt.best_metric_key": ["eval_default_pass4"],
    "data.dataset_probs": ["1.0"],
    "data.prompt_probs": ["1.0"],
    "data.input_template": ["Q: {}\nA: "],
    "data.max_len": ["4096"],
    "data.tokenizer_chat_template": ["template.jinja"],
    "ds.attn_implementation": ["eager"],
    "ds.grad_accum_dtype": ["bf16"],
    "ds.zero_stage": ["3"],
    "ds.zpg": ["2"],
    "eval.dataset": ["held-out.jsonl"],
    "eval.split": ["validation"],
    "logger.wandb.key": ["0123456789abcdef"],
    "lr_scheduler": ["constant_with_warmup"],
    "model.loss_type": ["log_exp"],
    "data.reward_tokens": ["good", "bad"],
    "data.placeholder_token": ["<step>"],
    "reward.remote_url": ["reward.py"],
    "reward.clip_range": ["-5", "5"],
    "reward.overlong_buffer_len": ["128"],
    "train.agent_func_path": ["agent.py"],
    "train.batch_size": ["64"],
    "train.max_epochs": ["3"],
    "train.micro_batch_size": ["4"],
    "rollout.temperature": ["0.7"],
    "train.max_tokens_per_gpu": ["8192"],
    "vllm_is_correction_type": ["icepop"],
}
_OF_A_KIND = {
    "flag": [],
    "int": ["2"],
    "float": ["0.25"],
    "pair": ["0.1", "0.3"],
    "floats": ["0.4", "4"],
    "str": ["some/name"],
    "words": ["q_proj", "v_proj"],
}


def values_of(flag: Flag) -> list[str]:
    """Words behind the flag that are not its default."""
    name = flag.name
    for prefix in ("actor.", "critic."):
        name = name if name in _VALUES else name.removeprefix(prefix)
    if name in _VALUES:
        return _VALUES[name]
    others = [choice for choice in flag.choices if choice != flag.default]
    return others[:1] or _OF_A_KIND[flag.kind]


def words(given: dict[str, list[str]]) -> list[str]:
    return [word for name, values in given.items() for word in (f"--{name}", *values)]


def imported(command: str, given: dict[str, list[str]], *, without: Iterable[str] = ()) -> Imported:
    """The command with what it needs, but for `without`, and `given`."""
    needed = {name: values for name, values in NEEDED[command].items() if name not in without}
    return import_command(CommandLine(command, tuple(words(needed | given)), ranks=1), prompts=4096)


def all_spellings(command: str) -> dict[str, tuple[str, ...]]:
    return spellings(command, COMMANDS[command].flags)
