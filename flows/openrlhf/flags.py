"""The flags of OpenRLHF's training commands: kind, default, and the setting that has the same meaning, if one does.

Names are those of version 0.11.2; `spellings` knows the older ones. train_prm and train_kto had gone by then: their
flags stand here under the names that they would have had.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["flag", "int", "float", "str", "pair", "floats", "words"]
"""pair: two numbers. floats: one or more. words: any number of strings."""


@dataclass(frozen=True)
class Flag:
    """`setting` is below the stage's section and takes the value as it is, given or default; the flags without one are
    read by a function of `supervised`, `rl` or `common`, or have no counterpart. `note` is said when the flag is given.
    """

    name: str
    kind: Kind = "flag"
    default: Any = None
    setting: str | None = None
    note: str | None = None
    choices: tuple[str, ...] = ()


def flag(name: str, setting: str | None = None, note: str | None = None) -> Flag:
    return Flag(name, "flag", False, setting, note)


_STORE = "artifacts and training checkpoints are in run.store"
_RING = "ring attention is not here"
_SHARED_RANKS = "policy, critic and reference share the ranks of ppo.trainer.ranks"
_SHARES = "always so: policy, critic and reference share the trainer's ranks; the sampler has accelerators of its own"
_ASYNC = "rollouts are synchronous here"
_SYNC = "weights go to the sampler through shared memory"
_NONE = "no counterpart"
_IGNORED = "OpenRLHF ignores it, and so does DeepSpeed's Muon here"
_VLM = "vision-language models are not supported"

CHECKPOINTS = (
    Flag("ckpt.output_dir", "str", "./ckpt", note="the model is the directory model/ of the artifact in run.store"),
    Flag("ckpt.path", "str", note=_STORE),
    Flag("ckpt.save_steps", "int", -1),
    flag("ckpt.save_hf", "trainer.save_hf"),
    flag("ckpt.disable_ds"),
    Flag("ckpt.max_num", "int", 3),
    Flag("ckpt.max_mem", "float"),
    flag("ckpt.load_enable", note="always so: a stage goes on from the newest training checkpoint of its own settings"),
    flag("ds.use_universal_ckpt", note="always so, where the number of ranks or the ZeRO stage has changed"),
)
LOGGING = (
    Flag("logger.logging_steps", "int", 1, "run.tracking.every_steps"),
    Flag("logger.wandb.key", "str"),
    Flag("logger.wandb.org", "str"),
    Flag("logger.wandb.group", "str"),
    Flag("logger.wandb.project", "str"),
    Flag("logger.wandb.run_name", "str"),
    Flag("logger.tensorboard_dir", "str"),
)
DEEPSPEED = (
    flag("ds.deepcompile", "trainer.deepcompile"),
    Flag("ds.zero_stage", "int", 2, "trainer.zero_stage"),
    Flag("ds.param_dtype", "str", "bf16", choices=("bf16", "fp16")),
    Flag("ds.zpg", "int", 1),
    flag("ds.adam_offload", "trainer.offload_optimizer"),
    Flag("ds.attn_implementation", "str", "flash_attention_2"),
    Flag(
        "ds.experts_implementation",
        "str",
        setting="trainer.experts_implementation",
        choices=("eager", "batched_mm", "grouped_mm", "deepgemm"),
    ),
    Flag("ds.grad_accum_dtype", "str"),
    flag("ds.overlap_comm", "trainer.overlap_comm"),
    Flag("ds.tensor_parallel_size", "int", 1),
    Flag("ds.ring_attn_size", "int", 1),
    Flag("ds.ring_attn_head_stride", "int", 1, note=f"{_RING}; Ulysses exchanges all heads at once"),
    flag("ds.load_in_4bit"),
    Flag("ds.lora.rank", "int", 0),
    Flag("ds.lora.alpha", "int", 16),
    Flag("ds.lora.target_modules", "words", "all-linear"),
    Flag("ds.lora.dropout", "float", 0.0),
    flag(
        "ds.packing_samples", "trainer.packing", note="rows are filled up to their length; micro_batch_size counts rows"
    ),
)
LIGER = (flag("ds.use_liger_kernel", "trainer.liger"),)
TRAINING = (
    Flag("train.micro_batch_size", "int", 8, "trainer.micro_batch_size"),
    Flag("train.batch_size", "int", 128),
    Flag("train.seed", "int", 42, "seed"),
    flag("train.full_determinism_enable", "trainer.deterministic"),
    Flag("train.max_epochs", "int", 1, "epochs"),
)
TOKENIZER = (
    flag("data.disable_fast_tokenizer", note="fast tokenizers alone give the offsets by which spans are found"),
    Flag("data.dataloader_num_workers", "int", 0, note="rows are made tokens once, before training"),
)
MISCELLANEOUS = (
    Flag("local_rank", "int", -1, note="Ray places the ranks"),
    flag("use_ms", note="download from ModelScope yourself and give the path"),
)
# Flags of older versions that 0.11.2 has no name for.
FORMER = (
    flag("bf16", note="always so unless `dtype` says otherwise"),
    flag("flash_attn"),
    flag("torch_compile", note=_NONE),
    flag("disable_trace_cache", note=_NONE),
    Flag("muon_adam_lr", "float", note="AdamW's part of Muon has the lr of the optimizer"),
    Flag("dist_backend", "str", "deepspeed", note="DeepSpeed alone trains here", choices=("deepspeed", "fsdp")),
)


def _optimizer(prefix: str = "", lr: float = 5e-6) -> tuple[Flag, ...]:
    return (
        Flag(f"{prefix}optim", "str", "adam", choices=("adam", "muon")),
        Flag(f"{prefix}adam.lr", "float", lr),
        Flag(f"{prefix}adam.betas", "pair", (0.9, 0.95)),
        Flag(f"{prefix}adam.eps", "float", 1e-8),
        Flag(f"{prefix}adam.weight_decay", "float", 0.0),
        Flag(f"{prefix}muon.lr", "float", 0.02),
        Flag(f"{prefix}muon.momentum", "float", 0.95),
        Flag(f"{prefix}muon.ns_steps", "int", 5, note=_IGNORED),
        flag(f"{prefix}muon.nesterov", note=_IGNORED),
        flag(f"{prefix}muon.no_nesterov", note=_IGNORED),
        Flag(f"{prefix}lr_scheduler", "str", "cosine_with_min_lr"),
        Flag(f"{prefix}lr_warmup_ratio", "float", 0.03),
        Flag(f"{prefix}min_lr_ratio", "float", 0.1),
        Flag(f"{prefix}max_norm", "float", 1.0),
    )


SUPERVISED = (
    *CHECKPOINTS,
    *LOGGING,
    *DEEPSPEED,
    *TRAINING,
    *TOKENIZER,
    *MISCELLANEOUS,
    *FORMER,
    *_optimizer(),
    Flag("eval.steps", "int", -1),
    Flag("eval.dataset", "str"),
    Flag("eval.split", "str", "train"),
    flag("model.gradient_checkpointing_enable", "trainer.activation_checkpointing"),
    flag("model.gradient_checkpointing_reentrant"),
    Flag("model.aux_loss_coef", "float", 0.0, "aux_loss_coef"),
    Flag("model.model_name_or_path", "str"),
    Flag("data.dataset", "str"),
    Flag("data.dataset_probs", "str"),
    Flag("data.dataset_split", "str", "train"),
    Flag("data.max_samples", "int", 1_000_000),
    Flag("data.input_template", "str"),
    flag("data.apply_chat_template"),
    Flag("data.tokenizer_chat_template", "str"),
    Flag("data.max_len", "int", 512, "max_len"),
)
_PAIR_COLUMNS = (
    Flag("data.prompt_key", "str"),
    Flag("data.chosen_key", "str", "chosen"),
    Flag("data.rejected_key", "str", "rejected"),
)
_SFT = (
    *LIGER,
    flag("model.pretrain_mode_enable"),
    flag("data.multiturn"),
    Flag("data.input_key", "str", "input"),
    Flag("data.output_key", "str"),
)
_RM = (
    Flag("ds.value_head_prefix", "str", "score", note="the head is always called score"),
    flag("model.compute_fp32_loss_enable", note="always so"),
    flag("model.margin_loss_enable", "use_margin"),
    Flag("model.loss_type", "str", "sigmoid"),
    *_PAIR_COLUMNS,
)
_NO_REFERENCE = "the reference's log-probs are computed once: no reference is in memory while training"
_DPO = (
    Flag("ref.model_name_or_path", "str"),
    flag("ref.offload", note=_NO_REFERENCE),
    *LIGER,
    Flag("model.beta", "float", 0.1, "beta"),
    flag("model.ipo_enable"),
    Flag("model.label_smoothing", "float", 0.0),
    Flag("model.nll_loss_coef", "float", 0.0, "nll_coef"),
    *_PAIR_COLUMNS,
)
_PRM = (
    *LIGER,
    Flag("data.placeholder_token", "str", setting="placeholder_token"),
    Flag("data.reward_tokens", "words"),
    Flag("data.input_key", "str", "input"),
    Flag("data.label_key", "str", "label"),
)
_KTO = (
    flag("ref.offload", note=_NO_REFERENCE),
    *LIGER,
    Flag("model.beta", "float", 0.01, "beta"),
    Flag("model.desirable_loss_weight", "float", 1.0, "desirable_weight"),
    Flag("model.undesirable_loss_weight", "float", 1.0, "undesirable_weight"),
    Flag("data.input_key", "str", "input"),
    Flag("data.output_key", "str"),
    Flag("data.label_key", "str", "label"),
)


def _placement(role: str) -> tuple[Flag, ...]:
    note = None if role == "actor" else _SHARED_RANKS
    if role == "reward":
        note = "a reward model outside the pipeline is served by `rlhf serve-reward`"
    return (
        Flag(f"{role}.num_nodes", "int", 1, note=note),
        Flag(f"{role}.num_gpus_per_node", "int", 8, note=note),
    )


_PPO = (
    *(one for role in ("actor", "critic", "ref", "reward") for one in _placement(role)),
    flag("train.colocate_actor_ref", note=_SHARES),
    flag("train.colocate_critic_reward", note=_SHARES),
    flag("train.colocate_all", note=_SHARES),
    Flag("vllm.num_engines", "int"),
    Flag("vllm.tensor_parallel_size", "int", 1, "sampler.tensor_parallel_size"),
    Flag("vllm.sync_backend", "str", "nccl", note=_SYNC),
    flag("vllm.sync_with_ray", note=_SYNC),
    flag("vllm.enable_prefix_caching", note="always so unless ppo.sampler.enable_prefix_caching is false"),
    flag("vllm.enforce_eager", "sampler.enforce_eager"),
    flag("vllm.enable_sleep", note="the sampler has accelerators of its own and does not sleep"),
    Flag("vllm.gpu_memory_utilization", "float", 0.95),
    Flag("algo.advantage.is_correction_level", "str", "off", choices=("off", "token", "seq")),
    Flag("algo.advantage.is_correction_mode", "str", "mask", choices=("mask", "clip")),
    Flag("algo.advantage.is_correction_gating", "str", "ratio", choices=("ratio", "binary_kl", "tv")),
    Flag("algo.advantage.is_correction_threshold", "floats", (0.5, 5.0)),
    Flag("algo.advantage.lambd", "float", 1.0),
    Flag("algo.advantage.gamma", "float", 1.0),
    Flag(
        "algo.advantage.estimator",
        "str",
        "gae",
        choices=("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"),
    ),
    flag("algo.advantage.no_std_norm"),
    Flag("algo.kl.target", "float"),
    Flag("algo.kl.horizon", "int", 10000),
    Flag("algo.kl.init_coef", "float", 0.01, "algorithm.kl.coef"),
    Flag("algo.kl.estimator", "str", "k1", choices=("k1", "k2", "k3")),
    flag("algo.kl.unbiased_gradient"),
    flag("algo.kl.use_loss"),
    flag("algo.dynamic_filtering_enable", "algorithm.dynamic_sampling.enabled"),
    Flag("algo.dynamic_filtering_range", "pair", (0.0, 1.0)),
    Flag("rollout.max_tokens_per_gpu", "int"),
    Flag("rollout.batch_size", "int", 1024, "rollout.prompts"),
    Flag("rollout.vllm_generate_batch_size", "int", note="a step asks the sampler for its own prompts"),
    Flag("rollout.micro_batch_size", "int", 1, note="scoring and training share ppo.trainer.micro_batch_size"),
    Flag("rollout.max_new_tokens", "int"),
    Flag("rollout.prompt_max_len", "int"),
    Flag("rollout.top_p", "float", 1.0),
    Flag("rollout.temperature", "float", 1.0, "rollout.temperature"),
    Flag("rollout.n_samples_per_prompt", "int", 1, "rollout.samples_per_prompt"),
    flag("reward.normalize_enable"),
    Flag("reward.clip_range", "pair", (-10.0, 10.0)),
    Flag("reward.overlong_buffer_len", "float"),
    Flag("reward.overlong_penalty_factor", "float", 1.0),
    Flag("reward.stop_properly_penalty_coef", "float", setting="algorithm.shaping.truncation"),
    Flag("reward.model_name_or_path", "str"),
    Flag("reward.remote_url", "str"),
    flag("reward.offload", note="a reward model outside the pipeline is served by `rlhf serve-reward`"),
    flag("ref.offload", note="the reference stays on the ranks' accelerators; ZeRO-3 divides it"),
    flag("actor.gradient_checkpointing_enable", "trainer.activation_checkpointing"),
    flag("actor.gradient_checkpointing_reentrant"),
    Flag("actor.eps_clip", "float", 0.2),
    Flag("actor.eps_clip_low_high", "pair"),
    Flag("actor.dual_clip", "float"),
    Flag("actor.policy_loss_type", "str", "ppo", choices=("ppo", "gspo")),
    Flag("actor.loss_agg_mode", "str", "token-mean", choices=("token-mean", "seq-mean-token-mean")),
    Flag("actor.aux_loss_coef", "float", 0.0, "aux_loss_coef"),
    Flag("actor.entropy_coef", "float"),
    *_optimizer("actor.", 1e-6),
    Flag("actor.model_name_or_path", "str"),
    flag("actor.freeze_visual_encoder", note=_VLM),
    Flag("critic.value_clip", "float", 0.5),
    Flag("critic.freezing_steps", "int", -1),
    flag("critic.save_value_network", note="the critic is in the training checkpoints alone"),
    *_optimizer("critic.", 9e-6),
    Flag("critic.model_name_or_path", "str"),
    flag("train.async_enable", note=_ASYNC),
    Flag("train.async_queue_size", "int", 1, note=_ASYNC),
    flag("train.partial_rollout_enable", note=_ASYNC),
    flag("train.enable_ema"),
    Flag("train.ema_beta", "float", 0.992),
    flag("train.dynamic_batch_enable"),
    Flag("train.max_tokens_per_gpu", "int", 16192),
    Flag("train.num_episodes", "int", 1),
    Flag("train.agent_func_path", "str"),
    *(one for one in TRAINING if one.name != "train.micro_batch_size"),
    Flag("train.micro_batch_size", "int", 1, "trainer.micro_batch_size"),
    *CHECKPOINTS,
    Flag("ckpt.best_metric_key", "str", ""),
    *DEEPSPEED,
    *LIGER,
    flag(
        "ds.enable_sleep",
        note="states of DeepSpeed stay on the ranks' accelerators; ds.adam_offload moves the optimizer's",
    ),
    Flag("ds.value_head_prefix", "str", "score", note="the head is always called score"),
    *TOKENIZER,
    Flag("data.max_len", "int", 2048),
    Flag("data.max_samples", "int", 100_000_000),
    Flag("data.prompt_dataset", "str"),
    Flag("data.prompt_probs", "str"),
    Flag("data.prompt_split", "str", "train"),
    Flag("data.input_key", "str", "input"),
    Flag("data.label_key", "str"),
    Flag("data.input_template", "str"),
    flag("data.apply_chat_template"),
    Flag("data.image_key", "str", "images", note=_VLM),
    Flag("data.max_images_per_prompt", "int", 0, note=_VLM),
    Flag("eval.steps", "int", -1),
    Flag("eval.dataset", "str"),
    Flag("eval.split", "str", "train"),
    Flag("eval.temperature", "float", 0.6),
    Flag("eval.n_samples_per_prompt", "int", 4),
    *LOGGING,
    *MISCELLANEOUS,
    *FORMER,
    flag("enable_vllm_is_correction"),
    Flag("vllm_is_correction_type", "str", "tis", choices=("tis", "icepop", "seq-mask-tis")),
    flag("actor_init_on_gpu", note=_NONE),
    flag("perf", note=_NONE),
    Flag("ptx_coef", "float", 0.05, note="OpenRLHF never read it"),
    Flag("rollout_tasks_per_gpu", "int", 32, note="requests are batched by ppo.sampler.max_num_seqs"),
)


def _with_defaults(flags: Iterable[Flag], **defaults: Any) -> dict[str, Flag]:
    """By name; `defaults` has those that this command alone has, with __ for the point."""
    ours = {name.replace("__", "."): value for name, value in defaults.items()}
    return {one.name: replace(one, default=ours.get(one.name, one.default)) for one in flags}


@dataclass(frozen=True)
class Command:
    """A training command: the section and the data set that it becomes, and its flags by name."""

    name: str
    section: str
    dataset: str
    project: str
    flags: dict[str, Flag]


_USER = "User: {}\nAssistant: "
COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            "train_sft",
            "sft",
            "sft",
            "openrlhf_train_sft",
            _with_defaults((*SUPERVISED, *_SFT), train__max_epochs=2, data__max_len=2048, data__input_template=_USER),
        ),
        Command(
            "train_rm",
            "rm",
            "pairs",
            "openrlhf_train_rm",
            _with_defaults((*SUPERVISED, *_RM), adam__lr=9e-6, train__micro_batch_size=1),
        ),
        Command(
            "train_dpo",
            "dpo",
            "pairs",
            "openrlhf_train_dpo",
            _with_defaults((*SUPERVISED, *_DPO), adam__lr=1e-5, eval__split="test"),
        ),
        Command(
            "train_prm",
            "prm",
            "steps",
            "openrlhf_train_prm",
            _with_defaults(
                (*SUPERVISED, *_PRM), adam__lr=1e-6, train__micro_batch_size=1, data__max_len=2048, eval__split="test"
            ),
        ),
        Command(
            "train_kto",
            "kto",
            "labelled",
            "openrlhf_train_dpo",
            _with_defaults(
                (*SUPERVISED, *_KTO),
                adam__lr=1e-5,
                data__max_len=2048,
                data__input_template=_USER,
                eval__split="test",
                model__model_name_or_path="bigscience/bloomz-1b7",
            ),
        ),
        Command("train_ppo_ray", "ppo", "prompts", "openrlhf_train_ppo", _with_defaults(_PPO)),
    )
}
