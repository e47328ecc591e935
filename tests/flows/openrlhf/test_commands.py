"""Commands as people have them, and the pipelines that mean the same run, written by hand from OpenRLHF's defaults."""

from pathlib import Path

import pytest
import yaml

from flows.openrlhf.importing import Imported, import_command
from flows.openrlhf.shell import from_script
from rlhf_core.config.pipeline import load_pipeline


def check(script: str, expected: str, tmp_path: Path, prompts: int | None = None) -> Imported:
    imported = import_command(from_script(script), prompts)
    text = imported.yaml()
    assert yaml.safe_load(text) == yaml.safe_load(expected)
    file = tmp_path / "pipeline.yaml"
    file.write_text(text, encoding="utf-8")
    load_pipeline(file)
    return imported


def flags_noted(imported: Imported) -> set[str]:
    return {note.flag for note in imported.notes}


def test_sft_on_conversations(tmp_path: Path):
    script = """
    deepspeed --num_gpus 8 --module openrlhf.cli.train_sft \\
       --model.model_name_or_path meta-llama/Llama-3.1-8B-Instruct \\
       --data.dataset HuggingFaceH4/ultrachat_200k --data.dataset_split train_sft \\
       --data.input_key messages --data.apply_chat_template --data.multiturn \\
       --eval.dataset HuggingFaceH4/ultrachat_200k --eval.split test_sft --eval.steps 100 \\
       --data.max_len 4096 --data.max_samples 500000 \\
       --train.batch_size 256 --train.micro_batch_size 2 \\
       --ckpt.output_dir ./out --ckpt.save_steps 200 \\
       --ds.zero_stage 3 --ds.packing_samples --model.gradient_checkpointing_enable \\
       --logger.wandb.key abcdef0123456789 --logger.wandb.project chat
    """
    # Defaults of its own: two epochs, lr 5e-6, seed 42, three checkpoints kept.
    expected = """
    run: {tracking: {wandb_project: chat, wandb_mode: online}}
    data:
      sft: {hub: HuggingFaceH4/ultrachat_200k, split: train_sft, eval_split: test_sft, max_samples: 500000}
    sft:
      model: {hub: meta-llama/Llama-3.1-8B-Instruct}
      text: {truncation: cut}
      optimizer: {lr: 5.0e-6}
      batch_size: 256
      max_len: 4096
      epochs: 2
      seed: 42
      eval_steps: 100
      trainer:
        ranks: 8
        zero_stage: 3
        micro_batch_size: 2
        activation_checkpointing: true
        packing: true
        save_steps: 200
        keep_checkpoints: 3
    """
    imported = check(script, expected, tmp_path)
    assert flags_noted(imported) >= {
        "--logger.wandb.key",
        "--ckpt.output_dir",
        "--ds.packing_samples",
        "--data.max_len",
    }
    assert "abcdef0123456789" not in imported.yaml()


def test_reward_model_on_pairs(tmp_path: Path):
    script = """
    set -x
    read -r -d '' training_commands <<EOF
    openrlhf.cli.train_rm \\
       --save_path ./checkpoint/llama3-8b-rm \\
       --save_steps -1 --logging_steps 10 --eval_steps -1 \\
       --train_batch_size 256 --micro_train_batch_size 1 \\
       --pretrain OpenRLHF/Llama-3-8b-sft-mixture \\
       --bf16 --max_epochs 1 --max_len 8192 --zero_stage 3 \\
       --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku,/data/own.jsonl \\
       --dataset_probs 0.9,0.1 \\
       --apply_chat_template --chosen_key chosen --rejected_key rejected \\
       --margin_loss --flash_attn --load_checkpoint --gradient_checkpointing
    EOF
    if [[ ${1} != "slurm" ]]; then
        torchrun --standalone --nproc-per-node ${NPROC_PER_NODE:-4} -m $training_commands
    fi
    """
    # Its own: lr 9e-6; a hundredth of the rows gives mean and std of the scores; mixtures are drawn with seed 42.
    expected = """
    run: {tracking: {every_steps: 10}}
    data:
      pairs:
        sources:
          - {hub: OpenRLHF/preference_dataset_mixture2_and_safe_pku, eval_share: 0.01, probability: 0.9}
          - {path: /data/own.jsonl, eval_share: 0.01, probability: 0.1}
        seed: 42
    rm:
      model: {hub: OpenRLHF/Llama-3-8b-sft-mixture}
      text: {truncation: cut}
      optimizer: {lr: 9.0e-6}
      batch_size: 256
      max_len: 8192
      epochs: 1
      seed: 42
      trainer:
        ranks: 4
        zero_stage: 3
        micro_batch_size: 1
        activation_checkpointing: true
        attention: flash_attention_2
      use_margin: true
    """
    imported = check(script, expected, tmp_path)
    assert "--eval.dataset" in flags_noted(imported)  # held-out rows that nobody asked for


def test_dpo_without_a_chat_template(tmp_path: Path):
    script = """
    python -m openrlhf.cli.train_dpo --pretrain ./sft --ref_pretrain /models/reference --dataset pairs.parquet \\
      --prompt_key question --chosen_key better --rejected_key worse --eval_dataset held-out.parquet --eval_steps 50 \\
      --label_smoothing 0.1 --nll_loss_coef 0.2 --lora_rank 32 --lora_alpha 64 --target_modules q_proj v_proj \\
      --lr_scheduler linear --lr_warmup_ratio 0.1 --l2 0.01 --adam_offload
    """
    # Its own: lr 1e-5, length 512, batch 128, beta 0.1, one epoch, micro-batch 8; no template, so the prompt alone.
    expected = """
    data:
      pairs:
        path: pairs.parquet
        eval_path: held-out.parquet
        columns: {prompt: question, chosen: better, rejected: worse}
    dpo:
      model: {path: ./sft}
      lora: {rank: 32, alpha: 64.0, target_modules: [q_proj, v_proj]}
      text: {format: template, input_template: '{}', truncation: cut}
      optimizer: {lr: 1.0e-5, weight_decay: 0.01, schedule: linear, warmup_ratio: 0.1, min_lr_ratio: 0.0}
      batch_size: 128
      max_len: 512
      epochs: 1
      seed: 42
      eval_steps: 50
      trainer: {offload_optimizer: true}
      label_smoothing: 0.1
      nll_coef: 0.2
      reference: {path: /models/reference}
    """
    imported = check(script, expected, tmp_path)
    assert flags_noted(imported) == {"launcher"}


def test_ipo_has_another_beta(tmp_path: Path):
    script = """
    openrlhf.cli.train_dpo --pretrain a/b --dataset c/d --apply_chat_template --ipo --beta 0.05 --label_smoothing 0.1
    """
    expected = """
    data: {pairs: {hub: c/d}}
    dpo:
      model: {hub: a/b}
      text: {truncation: cut}
      optimizer: {lr: 1.0e-5}
      batch_size: 128
      max_len: 512
      epochs: 1
      seed: 42
      beta: 0.05
      loss: ipo
    """
    assert flags_noted(check(script, expected, tmp_path)) == {"launcher", "--ipo", "--label_smoothing"}


PPO_MODEL = """
    sft:
      model: {hub: OpenRLHF/Llama-3-8b-sft-mixture}
      optimizer: {lr: 1.0e-30, schedule: constant, warmup_ratio: 0.0}
      batch_size: 8
      max_len: 512
      max_steps: 1
      trainer: {ranks: 2, zero_stage: 3, offload_optimizer: true, micro_batch_size: 1, save_steps: null}
"""


def test_ppo_with_a_reward_service(tmp_path: Path):
    script = """
    # python -m openrlhf.cli.serve_rm --port 5000
    ray job submit --address="http://127.0.0.1:8265" \\
       --runtime-env-json='{"working_dir": "/openrlhf"}' \\
       -- python3 -m openrlhf.cli.train_ppo_ray \\
       --ref_num_nodes 1 --ref_num_gpus_per_node 2 --critic_num_nodes 1 --critic_num_gpus_per_node 2 \\
       --actor_num_nodes 1 --actor_num_gpus_per_node 2 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 \\
       --colocate_actor_ref --pretrain OpenRLHF/Llama-3-8b-sft-mixture \\
       --remote_rm_url http://localhost:5000/get_reward \\
       --micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024 \\
       --max_samples 100000 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 2048 --zero_stage 3 --bf16 \\
       --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --freezing_actor_steps 10 \\
       --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template \\
       --normalize_reward --packing_samples --adam_offload --gradient_checkpointing > train.log 2>&1
    """
    # Its own: GAE's lambda 1, value clip 0.5, KL 0.01 in the reward, rewards within 10, 98 rollouts of 1024 prompts; it
    # trains the policy from the twelfth step on when told to freeze 10.
    expected = f"""
    data:
      sft: {{arithmetic: {{rows: 8}}}}
      prompts: {{hub: OpenRLHF/prompt-collection-v0.1, columns: {{prompt: context_messages}}, max_samples: 100000}}
      eval: {{hub: OpenRLHF/prompt-collection-v0.1, columns: {{prompt: context_messages}}, max_samples: 8}}
    {PPO_MODEL.strip()}
    ppo:
      optimizer: {{lr: 5.0e-7}}
      critic: {{optimizer: {{lr: 9.0e-6}}, warmup_steps: 11}}
      rollout: {{prompts: 1024, max_new_tokens: 2048, max_prompt_len: 1024}}
      reward: {{http: {{urls: ["http://localhost:5000/get_reward"]}}}}
      algorithm:
        gae_lambda: 1.0
        value_clip: 0.5
        kl: {{coef: 0.01}}
        shaping: {{clip: [-10.0, 10.0]}}
      steps: 98
      batch_size: 128
      seed: 42
      sampler: {{max_model_len: 3072, tensor_parallel_size: 2}}
      trainer:
        ranks: 2
        zero_stage: 3
        offload_optimizer: true
        activation_checkpointing: true
        packing: true
    """
    imported = check(script, expected, tmp_path)
    assert flags_noted(imported) >= {
        "--pretrain",
        "--vllm_num_engines",
        "--max_samples",
        "--normalize_reward",
        "--data.label_key",
        "--eval.dataset",
        "--ref_num_gpus_per_node",
        "--freezing_actor_steps",
    }


def test_grpo_with_a_reward_function(tmp_path: Path):
    script = """
    MODEL="Qwen/Qwen2.5-7B-Instruct"
    ROLLOUT=(
       --data.prompt_dataset math.jsonl   # ours
       --data.input_key question --data.label_key answer --data.apply_chat_template
       --rollout.batch_size 128
       --rollout.n_samples_per_prompt 8
       # --rollout.top_p 0.9
       --rollout.max_new_tokens 3072
       --data.max_len 4096
    )
    LOSS=( --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 )
    LOSS+=( --actor.eps_clip_low_high 0.2 0.28 --algo.dynamic_filtering_enable --reward.overlong_buffer_len 768 )
    python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path ${MODEL} "${ROLLOUT[@]}" ${LOSS[@]} \\
       --reward.remote_url reward_func.py --actor.adam.lr 1e-6 --actor.lr_scheduler constant_with_warmup \\
       --train.num_episodes 2 --actor.num_gpus_per_node 4 --vllm.num_engines 1 \\
       --eval.dataset aime.jsonl --eval.steps 10 --ckpt.best_metric_key eval_default_pass4 --ckpt.save_steps 20
    """
    # Its own: no normalisation with this estimator, token mean, batch of 128 samples, one micro-batch a sample;
    # evaluations draw 4 samples at temperature 0.6. 1000 prompts are 8 rollouts of 128, twice.
    expected = """
    data:
      sft: {arithmetic: {rows: 8}}
      prompts: {path: math.jsonl, columns: {prompt: question, label: answer}}
      eval: {path: aime.jsonl, columns: {prompt: question, label: answer}}
    sft:
      model: {hub: Qwen/Qwen2.5-7B-Instruct}
      optimizer: {lr: 1.0e-30, schedule: constant, warmup_ratio: 0.0}
      batch_size: 8
      max_len: 512
      max_steps: 1
      trainer: {ranks: 4, micro_batch_size: 1, save_steps: null}
    ppo:
      optimizer: {lr: 1.0e-6, schedule: constant}
      rollout: {prompts: 128, samples_per_prompt: 8, max_new_tokens: 3072, max_prompt_len: 1024}
      reward: {functions: [{path: reward_func.py}]}
      algorithm:
        estimator: group_norm
        normalise: none
        clip_high: 0.28
        kl: {coef: 0.001, estimator: k3, place: loss}
        shaping: {overlong_share: 0.25}
        dynamic_sampling: {enabled: true}
      steps: 16
      batch_size: 128
      seed: 42
      eval_steps: 10
      evaluation: {samples_per_prompt: 4, temperature: 0.6}
      best_metric: pass@4
      sampler: {max_model_len: 4096}
      trainer: {ranks: 4, micro_batch_size: 1, save_steps: 20, keep_checkpoints: 3}
    """
    imported = check(script, expected, tmp_path, prompts=1000)
    assert flags_noted(imported) == {
        "--actor.model_name_or_path",
        "--algo.dynamic_filtering_enable",
        "--ckpt.best_metric_key",
        "--data.max_len",
        "--eval.dataset",
    }


def test_a_process_reward_model(tmp_path: Path):
    script = """
    openrlhf.cli.train_prm --pretrain mistralai/Mistral-7B-v0.1 --dataset peiyi9979/Math-Shepherd --label_key label \\
      --placeholder_token ки --reward_tokens + - --max_len 8192 --train_batch_size 256 --packing_samples
    """
    # Its own: lr 1e-6, one epoch, micro-batch 1; no chat template.
    expected = """
    data: {steps: {hub: peiyi9979/Math-Shepherd}}
    prm:
      model: {hub: mistralai/Mistral-7B-v0.1}
      text: {format: template, input_template: '{}', truncation: cut}
      optimizer: {lr: 1.0e-6}
      batch_size: 256
      max_len: 8192
      epochs: 1
      seed: 42
      trainer: {micro_batch_size: 1, packing: true}
      placeholder_token: ки
      reward_tokens: [+, '-']
    """
    check(script, expected, tmp_path)


def test_kto(tmp_path: Path):
    script = """
    openrlhf.cli.train_kto --pretrain OpenRLHF/Llama-3-8b-sft-mixture \\
      --dataset Dylan2048/ultrafeedback-unpaired-preferences --input_key instruction --output_key response \\
      --label_key score --undesirable_loss_weight 1.5 --learning_rate 5e-7
    """
    # Its own: beta 0.01, length 2048, its template for the prompt.
    expected = """
    data:
      labelled:
        hub: Dylan2048/ultrafeedback-unpaired-preferences
        columns: {prompt: instruction, label: score}
    kto:
      model: {hub: OpenRLHF/Llama-3-8b-sft-mixture}
      text: {format: template, truncation: cut}
      optimizer: {lr: 5.0e-7}
      batch_size: 128
      max_len: 2048
      epochs: 1
      seed: 42
      beta: 0.01
      undesirable_weight: 1.5
    """
    check(script, expected, tmp_path)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--advantage_estimator reinforce --reward_pretrain /rm", ["estimator", "kl", "shaping"]),
        ("--reward_pretrain /rm --lambd 0.95", ["value_clip", "kl", "shaping"]),
    ],
)
def test_a_reward_model_is_served(tmp_path: Path, flags: str, settings: list[str]):
    line = f"openrlhf.cli.train_ppo_ray --pretrain a/b --prompt_data p.jsonl --normalize_reward {flags}"
    imported = import_command(from_script(line), 100)
    assert imported.values["ppo"]["reward"] == {"http": {"urls": ["http://127.0.0.1:5000/get_reward"]}}
    assert list(imported.values["ppo"]["algorithm"]) == settings
    command = "rlhf serve-reward --model /rm --no-token --normalize"
    assert any(note.flag == "--reward_pretrain" and command in note.text for note in imported.notes)


def test_held_out_rows_of_another_data_set():
    script = """
    openrlhf.cli.train_rm --pretrain a/b --dataset c/d --eval_dataset e/f --eval_split validation --apply_chat_template
    """
    imported = import_command(from_script(script))
    assert imported.values["data"] == {"pairs": {"hub": "c/d", "eval_hub": "e/f", "eval_split": "validation"}}
    assert flags_noted(imported) == {"launcher"}


def test_held_out_rows_that_are_the_training_rows():
    imported = import_command(from_script("openrlhf.cli.train_rm --pretrain a/b --dataset c/d --eval_dataset c/d"))
    assert imported.values["data"] == {"pairs": {"hub": "c/d", "eval_share": 0.01}}
    assert "--eval_dataset" in flags_noted(imported)


def test_adapters_of_policy_and_critic():
    script = """
    openrlhf.cli.train_ppo_ray --pretrain a/b --prompt_data p.jsonl --remote_rm_url http://h:1/r --lora_rank 8
      --aux_loss_coef 0.01
    """
    ppo = import_command(from_script(script.replace("\n", " ")), 100).values["ppo"]
    assert ppo["lora"] == ppo["critic"]["lora"] == {"rank": 8}
    assert ppo["aux_loss_coef"] == ppo["critic"]["aux_loss_coef"] == 0.01


def test_adapters_have_no_dropout_in_rl():
    script = """
    openrlhf.cli.train_ppo_ray --pretrain a/b --prompt_data p.jsonl --remote_rm_url http://h:1/r --lora_rank 8
      --lora_dropout 0.1
    """
    imported = import_command(from_script(script.replace("\n", " ")), 100)
    assert imported.values["ppo"]["lora"] == imported.values["ppo"]["critic"]["lora"] == {"rank": 8}
    (note,) = [note for note in imported.notes if "dropout" in note.flag]
    assert "ratios of log-probs" in note.text


def test_what_the_stage_would_refuse_is_said():
    script = """
    openrlhf.cli.train_sft --model.model_name_or_path a/b --data.dataset c/d --optim muon --ds.tensor_parallel_size 2
    """
    (note,) = [note for note in import_command(from_script(script)).notes if note.flag == "sft"]
    assert note.text.startswith("refuses to start as it stands: optimizer.name muon wants whole matrices")


def test_divided_sequences_are_packed_with_the_kernel_that_keeps_them_apart():
    script = "openrlhf.cli.train_sft --pretrain a/b --dataset c/d --ring_attn_size 2 --packing_samples"
    imported = import_command(from_script(script))
    assert imported.values["sft"]["trainer"] == {
        "ranks": 2, "attention": "flash_attention_2", "packing": True, "sequence_parallel": 2
    }  # fmt: skip
    assert "sft" not in flags_noted(imported)
