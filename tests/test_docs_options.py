"""The page of OpenRLHF's options is whole and right: every option has a row, every setting that is named exists."""

import re
from pathlib import Path

import typer.main

from flows.cli import app
from rlhf_core.config.base import Settings, settings_types
from rlhf_core.config.pipeline import PipelineSettings
from rlhf_core.config.shapes import SHAPES

STAGES = ("sft", "rm", "prm", "dpo", "kto")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "openrlhf-options.md"

# Of OpenRLHF 0.11.2, as its parsers have them.
ALL_THREE = """
ckpt.output_dir ckpt.save_steps ckpt.save_hf ckpt.disable_ds ckpt.path ckpt.max_num ckpt.max_mem ckpt.load_enable
eval.steps eval.dataset eval.split
logger.logging_steps logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name
logger.tensorboard_dir
ds.use_universal_ckpt ds.deepcompile ds.zero_stage ds.param_dtype ds.zpg ds.adam_offload ds.attn_implementation
ds.experts_implementation ds.grad_accum_dtype ds.overlap_comm ds.tensor_parallel_size ds.ring_attn_size
ds.ring_attn_head_stride ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout
ds.packing_samples
train.micro_batch_size train.batch_size train.seed train.full_determinism_enable train.max_epochs
model.gradient_checkpointing_enable model.gradient_checkpointing_reentrant model.aux_loss_coef model.model_name_or_path
data.disable_fast_tokenizer data.dataloader_num_workers data.dataset data.dataset_probs data.dataset_split
data.max_samples data.input_template data.apply_chat_template data.tokenizer_chat_template data.max_len
adam.lr adam.betas adam.eps adam.weight_decay
muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov
local_rank optim lr_scheduler lr_warmup_ratio min_lr_ratio max_norm use_ms
"""
SFT_ONLY = "ds.use_liger_kernel model.pretrain_mode_enable data.multiturn data.input_key data.output_key"
PAIRS = "data.prompt_key data.chosen_key data.rejected_key"
RM_ONLY = "ds.value_head_prefix model.compute_fp32_loss_enable model.margin_loss_enable model.loss_type"
DPO_ONLY = """
ref.offload ds.use_liger_kernel model.beta model.ipo_enable model.label_smoothing model.nll_loss_coef
ref.model_name_or_path
"""
PRM = """
save_path save_steps save_hf_ckpt disable_ds_ckpt logging_steps eval_steps ckpt_path max_ckpt_num max_ckpt_mem
load_checkpoint use_ds_universal_ckpt max_norm gradient_checkpointing deepcompile seed full_determinism local_rank
zero_stage param_dtype zpg adam_offload attn_implementation use_liger_kernel grad_accum_dtype overlap_comm
gradient_checkpointing_use_reentrant disable_fast_tokenizer ds_tensor_parallel_size load_in_4bit lora_rank lora_alpha
lora_dropout target_modules pretrain max_epochs aux_loss_coef learning_rate lr_warmup_ratio lr_scheduler
micro_train_batch_size train_batch_size l2 adam_betas placeholder_token reward_tokens packing_samples dataset
dataset_probs eval_dataset dataset_split eval_split max_samples input_key label_key max_len use_wandb wandb_org
wandb_group wandb_project wandb_run_name use_tensorboard use_ms
"""
RL = """
ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node train.colocate_actor_ref actor.num_nodes
actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node train.colocate_critic_reward train.colocate_all
vllm.num_engines vllm.tensor_parallel_size vllm.sync_backend vllm.sync_with_ray vllm.enable_prefix_caching
vllm.enforce_eager vllm.enable_sleep vllm.gpu_memory_utilization algo.advantage.is_correction_level
algo.advantage.is_correction_mode algo.advantage.is_correction_gating algo.advantage.is_correction_threshold
algo.advantage.lambd algo.advantage.gamma algo.kl.target algo.kl.horizon algo.kl.init_coef algo.kl.estimator
algo.kl.unbiased_gradient algo.advantage.estimator algo.kl.use_loss algo.advantage.no_std_norm
algo.dynamic_filtering_enable algo.dynamic_filtering_range rollout.max_tokens_per_gpu rollout.batch_size
rollout.vllm_generate_batch_size rollout.micro_batch_size rollout.max_new_tokens rollout.top_p rollout.temperature
rollout.n_samples_per_prompt reward.normalize_enable reward.clip_range reward.overlong_buffer_len
reward.overlong_penalty_factor reward.stop_properly_penalty_coef reward.model_name_or_path reward.remote_url
reward.offload ref.offload actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant actor.eps_clip
actor.eps_clip_low_high actor.dual_clip actor.policy_loss_type actor.loss_agg_mode actor.aux_loss_coef
actor.entropy_coef actor.optim actor.muon.lr actor.muon.momentum actor.muon.ns_steps actor.muon.nesterov
actor.muon.no_nesterov actor.adam.lr actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.lr_scheduler
actor.lr_warmup_ratio actor.min_lr_ratio actor.max_norm actor.model_name_or_path actor.freeze_visual_encoder
critic.value_clip critic.freezing_steps critic.save_value_network critic.optim critic.muon.lr critic.muon.momentum
critic.muon.ns_steps critic.muon.nesterov critic.muon.no_nesterov critic.adam.lr critic.adam.betas critic.adam.eps
critic.adam.weight_decay critic.lr_scheduler critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm
critic.model_name_or_path train.async_enable train.async_queue_size train.partial_rollout_enable train.enable_ema
train.ema_beta train.dynamic_batch_enable train.max_tokens_per_gpu train.num_episodes train.max_epochs
train.micro_batch_size train.batch_size train.seed train.full_determinism_enable train.agent_func_path
ds.use_universal_ckpt ds.zero_stage ds.deepcompile ds.param_dtype ds.zpg ds.adam_offload ds.attn_implementation
ds.experts_implementation ds.use_liger_kernel ds.grad_accum_dtype ds.overlap_comm ds.enable_sleep
ds.tensor_parallel_size ds.packing_samples ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules
ds.lora.dropout ds.ring_attn_size ds.ring_attn_head_stride ds.value_head_prefix data.disable_fast_tokenizer
data.dataloader_num_workers data.max_len data.max_samples data.prompt_dataset data.prompt_probs data.prompt_split
data.input_key data.label_key data.input_template data.apply_chat_template data.image_key data.max_images_per_prompt
eval.steps eval.dataset eval.split eval.temperature eval.n_samples_per_prompt ckpt.save_steps ckpt.path ckpt.save_hf
ckpt.disable_ds ckpt.max_num ckpt.max_mem ckpt.load_enable ckpt.best_metric_key ckpt.output_dir logger.logging_steps
logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name logger.tensorboard_dir
local_rank use_ms
"""
SERVE = """
reward.model_name_or_path reward.normalize_enable ds.value_head_prefix data.max_len port host ds.load_in_4bit
ds.param_dtype ds.attn_implementation ds.experts_implementation data.disable_fast_tokenizer ds.packing_samples
batch_size use_ms
"""
OPTIONS = {
    "SFT, RM and DPO": ALL_THREE.split(),
    "SFT alone": SFT_ONLY.split(),
    "RM alone": [*RM_ONLY.split(), *PAIRS.split()],
    "DPO alone": [*DPO_ONLY.split(), *PAIRS.split()],
    "PRM": PRM.split(),
    "RL": RL.split(),
    "Reward server": SERVE.split(),
}
SUPERVISED = [title for title in OPTIONS if title not in ("RL", "Reward server")]
# Of no use here, with the reason; nothing that does the same.
LEFT_OUT = {
    "use_ms",
    "local_rank",
    "data.disable_fast_tokenizer",
    "disable_fast_tokenizer",
    "ds.ring_attn_size",
    "ds.ring_attn_head_stride",
    "actor.freeze_visual_encoder",
    "data.image_key",
    "data.max_images_per_prompt",
}
# Not here yet, of RL and of the server; the page says so.
NOT_YET = """
train.colocate_all vllm.num_engines vllm.enable_sleep reward.offload ref.offload train.async_enable
train.async_queue_size train.partial_rollout_enable train.agent_func_path ds.enable_sleep
"""
NOT_YET_SERVED = "ds.load_in_4bit ds.attn_implementation ds.experts_implementation"
# What is always so here, or follows from something else than a setting; the page says which.
WITHOUT_SETTING = {
    "ckpt.load_enable",
    "load_checkpoint",
    "ds.use_universal_ckpt",
    "use_ds_universal_ckpt",
    "data.dataloader_num_workers",
    "muon.ns_steps",
    "muon.nesterov",
    "muon.no_nesterov",
    "ds.value_head_prefix",
    "model.compute_fp32_loss_enable",
    "ref.offload",
}
WITHOUT_SETTING_IN_RL = """
ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node critic.num_nodes
critic.num_gpus_per_node train.colocate_actor_ref train.colocate_critic_reward vllm.sync_backend vllm.sync_with_ray
rollout.vllm_generate_batch_size reward.normalize_enable actor.muon.ns_steps actor.muon.nesterov
actor.muon.no_nesterov critic.save_value_network critic.muon.ns_steps critic.muon.nesterov critic.muon.no_nesterov
ds.use_universal_ckpt ds.load_in_4bit ds.lora.dropout ds.value_head_prefix data.dataloader_num_workers
ckpt.load_enable
"""


def rows(*sections: str) -> list[tuple[str, str, str]]:
    """(section, option, what stands beside it); of all sections where none is named."""
    found = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = section.split("\n", 1)[0].strip()
        if not sections or title in sections:
            found += [(title, *row) for row in re.findall(r"^\| `--([\w.]+)` \| (.+) \|$", section, re.MULTILINE)]
    return found


def settings_in(cell: str) -> list[str]:
    """Dotted settings that a cell names, with <stage> and <set> as every stage and data set."""
    named = re.findall(r"`((?:run|data|<stage>|sft|rm|prm|dpo|kto|ppo)(?:\.[\w<>]+)+)`", cell)
    paths = [path.replace("<stage>", stage) for path in named for stage in (STAGES if "<stage>" in path else [""])]
    return [path.replace("<set>", kind) for path in paths for kind in (SHAPES if "<set>" in path else [""])]


def is_setting(path: str) -> bool:
    """Whether a dotted path leads to a field of the pipeline's settings."""
    models: list[type[Settings]] = [PipelineSettings]
    for part in path.split("."):
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if not fields:
            return False
        models = [inner for field in fields for inner in settings_types(field.annotation)]
    return True


def starting(what: str, *sections: str) -> set[str]:
    return {option for _, option, cell in rows(*sections) if cell.startswith(what)}


def test_every_option_has_a_row():
    found: dict[str, list[str]] = {}
    for section, option, _ in rows():
        found.setdefault(section, []).append(option)
    assert {section: sorted(options) for section, options in found.items()} == {
        section: sorted(options) for section, options in OPTIONS.items()
    }
    assert [len(RL.split()), len(SERVE.split())] == [167, 14]


def test_the_settings_of_the_rows_exist():
    wrong = [path for _, _, cell in rows() for path in settings_in(cell) if not is_setting(path)]
    assert not wrong
    assert is_setting("data.sft.sources.probability")
    assert is_setting("ppo.critic.optimizer.lr")
    assert not is_setting("sft.trainer.rank")
    assert settings_in("`<stage>.max_len`") == [f"{stage}.max_len" for stage in ("sft", "rm", "prm", "dpo", "kto")]
    assert settings_in("`data.<set>.split`, split")[::5] == ["data.sft.split", "data.eval.split"]


def test_what_has_no_setting_is_known():
    assert starting("left out") == LEFT_OUT
    assert starting("not here yet", "RL") == set(NOT_YET.split())
    assert starting("not here yet", "Reward server") == set(NOT_YET_SERVED.split())
    assert not starting("not here yet", *SUPERVISED)
    without = {option for _, option, cell in rows(*SUPERVISED) if not settings_in(cell)}
    assert without - LEFT_OUT == WITHOUT_SETTING
    without = starting("none", "RL") | starting("always", "RL")
    assert without == set(WITHOUT_SETTING_IN_RL.split())
    others = {option for _, option, cell in rows("RL") if not settings_in(cell)}
    assert others <= without | LEFT_OUT | set(NOT_YET.split())


def test_the_servers_options_are_those_of_its_command():
    command = typer.main.get_command(app).commands["serve-reward"]  # type: ignore[attr-defined]
    ours = {name for parameter in command.params for name in parameter.opts}
    cells = [cell for *_, cell in rows("Reward server")]
    named = [name for cell in cells for name in re.findall(r"`(--[\w-]+)`", cell)]
    assert len(named) == 7
    assert set(named) <= ours
    assert all(re.match(r"`--|left out|not here yet|none|always", cell) for cell in cells)
