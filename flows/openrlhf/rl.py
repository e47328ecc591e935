"""train_ppo_ray as a pipeline: the stage ppo, and a stage sft that hands it OpenRLHF's model unchanged."""

from flows.openrlhf.arguments import Arguments
from flows.openrlhf.common import (
    Values,
    adapters,
    checkpoints,
    data_source,
    engine,
    model_source,
    named_alike,
    optimizer,
    put,
    tracking,
)
from flows.openrlhf.rl_algorithm import algorithm
from flows.openrlhf.rl_rewards import reward
from flows.openrlhf.supervised import input_template, share_ranks
from rlhf_core.config.base import SettingsError

# Steps where neither the command line nor the caller says how many prompts there are.
_STEPS = 100
# A learning rate that moves no weight: float32 masters are rounded to what they were.
_STANDING_STILL = 1e-30
_EVALUATED = 8


def reinforcement(arguments: Arguments, prompts: int | None) -> Values:
    """The values of a pipeline file. prompts: how many the data set has, where that is known."""
    section: Values = {}
    top: Values = {"data": {}, "sft": {}, "ppo": section}
    named_alike(arguments, section, top)
    _lengths(arguments, section)
    section["optimizer"] = optimizer(arguments, "actor.")
    section["reward"] = reward(arguments)
    section["algorithm"] = algorithm(arguments, section)
    section["batch_size"] = _batch_size(arguments)
    section["steps"] = _steps(arguments, prompts)
    put(section, "lora", _adapters(arguments))
    _critic(arguments, section)
    engine(arguments, section, "actor")
    _placement(arguments, section)
    _micro_batches(arguments, section)
    checkpoints(arguments, section)
    _average(arguments, section)
    top["data"] = _data(arguments, section)
    top["sft"] = _model_as_it_is(arguments, section, top["data"])
    tracking(arguments, top)
    return top


def _model_as_it_is(arguments: Arguments, section: Values, data: Values) -> Values:
    """A stage sft whose model is the one that it is given: one step of a learning rate that moves nothing.

    PPO starts from a stage. What the stage reads prompts through, PPO does too.
    """
    model = model_source(arguments, "actor.model_name_or_path")
    if model is None:
        raise arguments.refuse("actor.model_name_or_path", "is missing; give a directory or a name on the hub")
    arguments.note(
        "actor.model_name_or_path", "ppo starts from a stage: sft, with one step that moves no weight, hands it on"
    )
    data["sft"] = {"arithmetic": {"rows": 8}}
    if arguments["data.apply_chat_template"]:
        arguments.note("data.input_template", "no effect with a chat template, in OpenRLHF neither")
        text: Values = {"format": "chat"}
    else:
        text = {"format": "template", "input_template": input_template(arguments)}
    return {
        "model": model,
        "text": text,
        "optimizer": {"lr": _STANDING_STILL, "schedule": "constant", "warmup_ratio": 0.0},
        "batch_size": 8,
        "max_len": min(512, section["sampler"]["max_model_len"]),
        "max_steps": 1,
        "dtype": section["dtype"],
        "trainer": {
            "ranks": section["trainer"]["ranks"],
            "zero_stage": arguments["ds.zero_stage"],
            "offload_optimizer": arguments["ds.adam_offload"],
            "micro_batch_size": 1,
            "save_steps": None,
        },
    }


def _lengths(arguments: Arguments, section: Values) -> None:
    """Prompts and responses have lengths of their own here, whose sum the sampler's model length holds."""
    given = {name: arguments[name] for name in ("rollout.prompt_max_len", "rollout.max_new_tokens")}
    prompt, response = given.values()
    whole = arguments["data.max_len"]
    if prompt is not None:  # the flat spelling, in which both are 1024 unless given and max_len is their sum
        response = response or 1024
        whole = max(whole if "data.max_len" in arguments else 0, prompt + response)
    elif response is None:
        response = whole // 2
        arguments.remark(
            "ppo.rollout",
            f"a response has {response} tokens and a prompt the rest of {whole}; in OpenRLHF a response may take what "
            "its prompt leaves",
        )
    prompt = whole - response if prompt is None else prompt
    if prompt < 1 or response < 1:
        raise SettingsError(
            f"train_ppo_ray: responses of {response} tokens leave {prompt} of {arguments.spelt('data.max_len')} "
            f"{whole} to a prompt; raise it, or lower {arguments.spelt('rollout.max_new_tokens')}"
        )
    put(section, "rollout.max_prompt_len", prompt)
    put(section, "rollout.max_new_tokens", response)
    put(section, "sampler.max_model_len", whole)
    for name in ("rollout.prompt_max_len", "data.max_len"):
        arguments.note(name, "longer prompts are left out and counted; OpenRLHF cuts their beginning")
    if arguments["rollout.top_p"] < 1:
        arguments.note(
            "rollout.top_p", "1 here: the trainer's log-probs know no nucleus; lower the temperature instead"
        )


def _batch_size(arguments: Arguments) -> int:
    """The largest size up to the given one that divides a rollout."""
    rollout = arguments["rollout.batch_size"] * arguments["rollout.n_samples_per_prompt"]
    asked = arguments["train.batch_size"]
    size = next(size for size in range(max(1, min(asked, rollout)), 0, -1) if rollout % size == 0)
    if size != asked:
        arguments.say("train.batch_size", f"{asked} does not divide a rollout of {rollout} samples; {size} does")
    return size


def _steps(arguments: Arguments, prompts: int | None) -> int:
    """Rollouts of all episodes, the last and smaller one of each counted."""
    episodes, size = arguments["train.num_episodes"], arguments["rollout.batch_size"]
    if prompts is not None:
        known = min(prompts, arguments["data.max_samples"])
    elif "data.max_samples" in arguments:
        known = arguments["data.max_samples"]
        arguments.note("data.max_samples", f"ppo.steps supposes that there are as many prompts: {known}")
    else:
        steps = _STEPS * episodes
        arguments.say(
            "train.num_episodes",
            f"ppo.steps counts rollouts, and the number of prompts is not known: {steps} is a guess; give --prompts",
        )
        return steps
    return episodes * max(1, -(-known // size))


_CRITIC = ("critic.value_clip", "algo.advantage.lambd", "critic.model_name_or_path", "critic.freezing_steps")


def _critic(arguments: Arguments, section: Values) -> None:
    """The section `critic`, for GAE alone."""
    estimator = arguments["algo.advantage.estimator"]
    if estimator != "gae":
        flags = [name for name in arguments.command.flags if name.startswith("critic.") and "num_" not in name]
        for name in (*flags, *_CRITIC):
            arguments.note(name, f"no effect: the estimator {estimator} has no critic")
        return
    frozen = arguments["critic.freezing_steps"] + 1  # OpenRLHF trains the policy from the step after that one on
    warmup = max(0, min(frozen, section["steps"] - 1))
    if frozen > 0:
        arguments.note(
            "critic.freezing_steps", f"the critic alone is trained for {warmup} steps, as many as in OpenRLHF"
        )
    section["critic"] = {
        "optimizer": optimizer(arguments, "critic."),
        "aux_loss_coef": arguments["actor.aux_loss_coef"],
        "warmup_steps": warmup,
    }
    put(section, "critic.lora", section.get("lora"))
    _critic_start(arguments)


def _critic_start(arguments: Arguments) -> None:
    given = arguments["critic.model_name_or_path"]
    if given is not None and given == arguments["actor.model_name_or_path"]:
        arguments.note("critic.model_name_or_path", "the policy's, which is the default here")
    elif given is not None:
        arguments.note("critic.model_name_or_path", "the critic starts from the policy's body with a head of zeros")
    elif arguments["reward.remote_url"] is None and arguments["train.agent_func_path"] is None:
        arguments.note("reward.model_name_or_path", "the critic starts from the policy, not from the reward model")


def _adapters(arguments: Arguments) -> Values | None:
    lora = adapters(arguments)
    if lora is not None and lora.pop("dropout"):
        arguments.note("ds.lora.dropout", "none in RL: ratios of log-probs before and after an update would be noise")
    if lora is not None and lora.pop("load_in_4bit"):
        arguments.note(
            "ds.load_in_4bit", "for the supervised stages; the sampler is given whole weights after each step"
        )
    return lora


def _placement(arguments: Arguments, section: Values) -> None:
    put(section, "trainer.ranks", arguments["actor.num_nodes"] * arguments["actor.num_gpus_per_node"])
    if "vllm.gpu_memory_utilization" in arguments:
        put(section, "sampler.gpu_memory_utilization", arguments["vllm.gpu_memory_utilization"])
    share_ranks(arguments, section)
    if arguments["vllm.num_engines"] != 1:
        arguments.note("vllm.num_engines", "one engine, of ppo.sampler.tensor_parallel_size accelerators")


def _micro_batches(arguments: Arguments, section: Values) -> None:
    """A budget of tokens is a number of packed rows of the sampler's length."""
    budgets = ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu")
    if not arguments["train.dynamic_batch_enable"]:
        for name in budgets:
            arguments.note(name, "no effect without --train.dynamic_batch_enable, in OpenRLHF neither")
        return
    length = section["sampler"]["max_model_len"]
    rows = max(1, arguments["train.max_tokens_per_gpu"] // length)
    put(section, "trainer.packing", True)
    put(section, "trainer.micro_batch_size", rows)
    arguments.note("train.dynamic_batch_enable", f"the budget is packed rows of {length} tokens, {rows} at once")
    arguments.note("train.max_tokens_per_gpu", f"packed rows of {length} tokens, {rows} at once")
    arguments.note("rollout.max_tokens_per_gpu", "scoring has the micro-batches of training")
    arguments.note("train.micro_batch_size", "no effect with a budget of tokens, in OpenRLHF neither")


def _average(arguments: Arguments, section: Values) -> None:
    if arguments["train.enable_ema"]:
        section["ema_decay"] = arguments["train.ema_beta"]
        arguments.note("train.enable_ema", "the average is kept in float32, evaluated and exported")
    else:
        arguments.note("train.ema_beta", "no effect without --train.enable_ema")


def _data(arguments: Arguments, section: Values) -> Values:
    """Prompts, and held-out prompts, which every evaluation of ppo reads."""
    columns = {}
    for ours, flag in (("prompt", "data.input_key"), ("label", "data.label_key")):
        if arguments[flag] is not None and arguments[flag] != ours:
            columns[ours] = arguments[flag]
    if arguments["data.label_key"] is None:
        arguments.say(
            "data.label_key", "none is given, and each row wants a column label, which rewards may leave unread"
        )
    data = data_source(arguments, "data.prompt_dataset", "data.prompt_probs", "data.prompt_split", columns)
    return {"prompts": data, "eval": _held_out_prompts(arguments, section, data, columns)}


def _held_out_prompts(arguments: Arguments, section: Values, data: Values, columns: Values) -> Values:
    """A data set of its own, unlike the held-out rows of a supervised stage."""
    if not arguments["eval.dataset"]:
        for name in (
            "eval.split",
            "eval.steps",
            "eval.temperature",
            "eval.n_samples_per_prompt",
            "ckpt.best_metric_key",
        ):
            arguments.note(name, "no effect without --eval.dataset, in OpenRLHF neither")
        arguments.say(
            "eval.dataset", f"none is given: the first {_EVALUATED} training prompts stand in data.eval; give others"
        )
        source = {key: value for key, value in data.get("sources", [data])[0].items() if key != "probability"}
        return {**source, "max_samples": _EVALUATED}
    arguments.note("eval.dataset", "answers are compared with the label (evaluation.verifier), not rewarded")
    evaluation: Values = {
        "samples_per_prompt": arguments["eval.n_samples_per_prompt"],
        "temperature": arguments["eval.temperature"],
    }
    section["evaluation"] = evaluation
    put(section, "eval_steps", arguments["eval.steps"] if arguments["eval.steps"] > 0 else None)
    _best(arguments, section, evaluation["samples_per_prompt"])
    return _all_of(arguments, columns)


def _all_of(arguments: Arguments, columns: Values) -> Values:
    """`eval.dataset` as a data set: all rows of all that it names."""
    of_training = ("data.max_samples", "data.prompt_probs")
    others = {name: value for name, value in arguments.given.items() if name not in of_training}
    held_out = Arguments(arguments.command, others, arguments.notes)
    return data_source(held_out, "eval.dataset", "data.prompt_probs", "eval.split", columns)


def _best(arguments: Arguments, section: Values, samples: int) -> None:
    """Which evaluation's weights are exported; OpenRLHF keeps a checkpoint of them and exports the last ones."""
    key = arguments["ckpt.best_metric_key"]
    if key in ("", "none"):
        arguments.note("ckpt.best_metric_key", "the last step's weights are exported")
        return
    metric = {"1": f"mean@{samples}", str(samples): f"pass@{samples}"}.get(key.rpartition("_pass")[2])
    if metric is None or arguments["ckpt.disable_ds"]:
        arguments.note("ckpt.best_metric_key", f"{key} has no counterpart; see ppo.best_metric")
        return
    section["best_metric"] = metric
    arguments.note("ckpt.best_metric_key", f"{metric}; the step with the best one is what is exported")
