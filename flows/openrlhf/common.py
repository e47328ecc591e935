"""What the supervised stages and RL have in common: models, data, the optimizer, adapters, checkpoints, tracking."""

import re
from pathlib import Path
from typing import Any

from flows.openrlhf.arguments import Arguments

Values = dict[str, Any]

_DATA_FILE = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".py")
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def put(values: Values, setting: str, value: Any) -> None:
    """Sets `a.b.c`; None, which is no value of OpenRLHF's, is left out."""
    if value is None:
        return
    *groups, name = setting.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[name] = value


def named_alike(arguments: Arguments, section: Values, top: Values) -> None:
    """The flags that have a setting which takes their value, and the notes of those that are given."""
    for flag in arguments.command.flags.values():
        if flag.setting is not None:
            put(top if flag.setting.startswith("run.") else section, flag.setting, arguments[flag.name])
        if flag.note is not None:
            arguments.note(flag.name, flag.note)


def is_path(text: str) -> bool:
    """Whether a source is a file or directory and no name on the hub."""
    return text.endswith(_DATA_FILE) or not _HUB_NAME.fullmatch(text) or text.startswith(".") or Path(text).exists()


def model_source(arguments: Arguments, name: str) -> Values | None:
    """A model's directory, or its name on the hub."""
    source = arguments[name]
    if not source:
        return None
    _say_variables(arguments, name, source)
    return {"path": source} if is_path(source) else {"hub": source}


def data_source(arguments: Arguments, names: str, probabilities: str, split: str, columns: Values) -> Values:
    """The training rows of one source, or of a comma list as a mixture."""
    given = arguments[names]
    if not given:
        raise arguments.refuse(names, "is missing, and there is nothing to train on; give a file or a data set")
    items = [item.strip() for item in given.split(",") if item.strip()]
    shares = _shares(arguments, probabilities, len(items))
    sources = [_one_source(arguments, names, item) for item in items]
    limit = arguments.asked("data.max_samples")
    for source, share in zip(sources, shares, strict=True):
        put(source, "split", arguments[split] if arguments[split] != "train" else None)
        put(source, "columns", columns)
        put(source, "probability", share)
        put(source, "max_samples", limit)
    if len(sources) == 1:
        return sources[0]
    mixture: Values = {"sources": sources}
    put(mixture, "max_samples", limit)
    put(mixture, "seed", arguments["train.seed"] if shares[0] is not None else None)
    return mixture


def _shares(arguments: Arguments, name: str, items: int) -> list[float | None]:
    given = arguments[name]
    if not given:
        return [None] * items
    try:
        shares: list[float | None] = [float(share) for share in given.split(",")]
    except ValueError:
        raise arguments.refuse(name, f"wants numbers with commas between them (given {given})") from None
    if len(shares) != items:
        raise arguments.refuse(name, f"has {len(shares)} numbers for {items} data sets; give one for each")
    if items > 1:
        return shares
    arguments.note(name, "one data set alone has no share")
    return [None]


def _one_source(arguments: Arguments, name: str, item: str) -> Values:
    place, at, directory = (part.strip() for part in item.partition("@"))
    _say_variables(arguments, name, item)
    if place.endswith(".py"):
        arguments.note(name, f"{place} has to define load_rows(split), and no data set script of Hugging Face's is run")
    if is_path(place):
        return {"path": f"{place}/{directory}" if at else place}
    if not at:
        return {"hub": place}
    arguments.note(name, f"`@{directory}` has become the configuration of that name; of a folder give the path")
    return {"hub": place, "subset": directory}


def _say_variables(arguments: Arguments, name: str, value: str) -> None:
    if re.search(r"\$\{?\w|`|\$\(", value):
        arguments.note(
            name, f"{value} holds what the shell would replace, and the script does not say by what; put it in"
        )


def held_out(arguments: Arguments, data: Values, name: str, split: str) -> bool:
    """Rows for evaluations, from `eval.dataset`; whether there are any."""
    given = arguments[name]
    if not given:
        arguments.note(split, f"no effect without --{name}, in OpenRLHF neither")
        return False
    parts: list[Values] = data.get("sources", [data])
    items = [item.strip() for item in given.split(",") if item.strip()]
    for item, part in zip(items, parts, strict=False):
        _hold_out(arguments, name, split, part, _one_source(arguments, name, item))
    for item in items[len(parts) :]:
        arguments.note(name, f"{item} has no place: each source of training rows has one of held-out rows")
    return True


def _hold_out(arguments: Arguments, name: str, split: str, part: Values, source: Values) -> None:
    """Puts the place of held-out rows into a source of training rows."""
    asked = arguments.asked(split)
    same = all(source.get(key) == part.get(key) for key in ("path", "hub", "subset"))
    if same and (asked or "train") == part.get("split", "train"):
        part["eval_share"] = 0.01
        arguments.note(name, "the training rows; a hundredth of them is held out instead")
    elif same:
        part["eval_split"] = asked
    elif "path" in source:
        part["eval_path"] = source["path"]
        put(part, "eval_split", asked)
    else:
        part["eval_hub"] = source["hub"]
        put(part, "eval_subset", source.get("subset"))
        put(part, "eval_split", asked)


SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "inverse_sqrt": "inverse_sqrt",
}
_OPTIMIZER = {
    "adam.betas": "betas",
    "adam.eps": "eps",
    "adam.weight_decay": "weight_decay",
    "lr_warmup_ratio": "warmup_ratio",
    "max_norm": "max_grad_norm",
}


def optimizer(arguments: Arguments, prefix: str = "") -> Values:
    """lr, schedule and the rest, of the flags that begin with `prefix`."""
    values: Values = {"lr": arguments[f"{prefix}adam.lr"]}
    for flag, setting in _OPTIMIZER.items():
        values[setting] = arguments[prefix + flag]
    if arguments[f"{prefix}optim"] == "muon":
        values |= {
            "name": "muon",
            "muon_lr": arguments[f"{prefix}muon.lr"],
            "muon_momentum": arguments[f"{prefix}muon.momentum"],
        }
        arguments.note(f"{prefix}optim", "weight decay leaves out biases and norms, and Muon's updates are not clipped")
    else:
        for flag in ("muon.lr", "muon.momentum"):
            arguments.note(prefix + flag, "no effect with AdamW")
    return values | _schedule(arguments, prefix)


def _schedule(arguments: Arguments, prefix: str) -> Values:
    name, floor = f"{prefix}lr_scheduler", f"{prefix}min_lr_ratio"
    given = arguments[name]
    if given not in SCHEDULES:
        arguments.note(name, f"{given} has no counterpart; cosine stands in its place")
    schedule = SCHEDULES.get(given, "cosine")
    values: Values = {"schedule": schedule}
    if given in ("cosine", "linear"):
        values["min_lr_ratio"] = 0.0
    elif schedule == "cosine":
        values["min_lr_ratio"] = arguments[floor]
        return values
    if given == "constant":
        values["warmup_ratio"] = 0.0
        arguments.note(f"{prefix}lr_warmup_ratio", "no effect: the scheduler constant has no warm-up")
    if schedule == "wsd":
        arguments.note(name, "the rate falls over the last fifth of the steps (decay_ratio), linearly")
    arguments.note(floor, f"no effect with the scheduler {given}, in OpenRLHF neither")
    return values


def adapters(arguments: Arguments) -> Values | None:
    """The section `lora`, or None."""
    rank = arguments["ds.lora.rank"]
    if not rank:
        for name in ("ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules"):
            arguments.note(name, f"no effect without {arguments.spelt('ds.lora.rank')}")
        arguments.note("ds.load_in_4bit", f"here with adapters alone; give {arguments.spelt('ds.lora.rank')} too")
        return None
    modules = arguments["ds.lora.target_modules"]
    return {
        "rank": rank,
        "alpha": float(arguments["ds.lora.alpha"]),
        "dropout": arguments["ds.lora.dropout"],
        "target_modules": "all-linear" if modules in ("all-linear", ("all-linear",), ()) else list(modules),
        "load_in_4bit": arguments["ds.load_in_4bit"],
    }


_ATTENTION = ("sdpa", "eager", "flash_attention_2")


def engine(arguments: Arguments, section: Values, checkpointing: str) -> None:
    """dtype and what of the trainer needs more than its name. checkpointing: `model` or `actor`, the flags' prefix."""
    section["dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[arguments["ds.param_dtype"]]
    attention = arguments["ds.attn_implementation"]
    if "flash_attn" in arguments:
        put(section, "trainer.attention", "flash_attention_2")
        arguments.note("ds.attn_implementation", "no effect beside --flash_attn")
    elif attention not in _ATTENTION:
        arguments.note("ds.attn_implementation", f"{attention} has no counterpart; trainer.attention is sdpa")
    elif "ds.attn_implementation" in arguments:  # the default wants a package that a machine without CUDA has not
        put(section, "trainer.attention", attention)
    reentrant = f"{checkpointing}.gradient_checkpointing_reentrant"
    if arguments[reentrant]:
        if arguments[f"{checkpointing}.gradient_checkpointing_enable"]:
            put(section, "trainer.activation_checkpointing_reentrant", True)
        else:
            arguments.note(reentrant, "no effect without gradient checkpointing")
    _grad_dtype(arguments, section)
    if arguments["ds.zpg"] > 1 and arguments["ds.zero_stage"] == 3:
        put(section, "trainer.zpg", arguments["ds.zpg"])
    elif arguments["ds.zpg"] > 1:
        arguments.note("ds.zpg", "no effect without ZeRO stage 3")


def _grad_dtype(arguments: Arguments, section: Values) -> None:
    given = arguments["ds.grad_accum_dtype"]
    names = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    if given in names:
        put(section, "trainer.grad_accum_dtype", names[given])
    if given is not None and (given not in names or names[given] == "float32"):
        text = "always so" if given in names else f"{given} has no counterpart; gradients add up in float32"
        arguments.note("ds.grad_accum_dtype", text)


def checkpoints(arguments: Arguments, section: Values) -> None:
    """Training checkpoints. OpenRLHF makes none unless told to; ours, every 50 steps, change nothing else."""
    trainer: Values = section.setdefault("trainer", {})
    if arguments["ckpt.disable_ds"]:
        trainer["save_steps"] = None
        trainer.pop("save_hf", None)
        arguments.note("ckpt.disable_ds", "without training checkpoints a stage that was killed starts over")
        for name in ("ckpt.save_steps", "ckpt.save_hf", "ckpt.max_num", "ckpt.max_mem"):
            arguments.note(name, "no effect: there are no training checkpoints, of which it would be a part")
        return
    if arguments["ckpt.save_steps"] > 0:
        trainer["save_steps"] = arguments["ckpt.save_steps"]
    else:
        arguments.note(
            "ckpt.save_steps", "training checkpoints are made every 50 steps, for a killed stage to go on from"
        )
    if "ckpt.max_num" in arguments or arguments["ckpt.save_steps"] > 0:
        trainer["keep_checkpoints"] = arguments["ckpt.max_num"]
    put(trainer, "keep_checkpoints_gib", arguments["ckpt.max_mem"])


def tracking(arguments: Arguments, top: Values) -> None:
    """W&B where OpenRLHF would use it, and TensorBoard. A key of W&B is never written down."""
    if arguments["logger.wandb.key"]:
        arguments.note("logger.wandb.key", "not written down: give it in the environment variable WANDB_API_KEY")
        put(top, "run.tracking.wandb_mode", "online")
        put(top, "run.tracking.wandb_project", arguments["logger.wandb.project"] or arguments.command.project)
        put(top, "run.tracking.wandb_entity", arguments["logger.wandb.org"])
        put(top, "run.tracking.wandb_group", arguments["logger.wandb.group"])
        put(top, "run.tracking.run_name", arguments["logger.wandb.run_name"])
    else:
        for name in ("org", "group", "project", "run_name"):
            arguments.note(f"logger.wandb.{name}", "no effect without a key of W&B, in OpenRLHF neither")
    if arguments["logger.tensorboard_dir"]:
        put(top, "run.tracking.tensorboard", True)
        arguments.note("logger.tensorboard_dir", "TensorBoard's files are in the stage's artifact")
