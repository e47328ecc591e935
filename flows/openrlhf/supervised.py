"""train_sft, train_rm, train_prm, train_dpo and train_kto as a pipeline of one stage."""

from flows.openrlhf.arguments import Arguments
from flows.openrlhf.common import (
    Values,
    adapters,
    checkpoints,
    data_source,
    engine,
    held_out,
    model_source,
    named_alike,
    optimizer,
    put,
    tracking,
)

_HELD_OUT_SHARE = 0.01  # OpenRLHF measures a reward model on this share of its training rows when it is given no others


def supervised(arguments: Arguments, launched: int | None) -> Values:
    """The values of a pipeline file. launched: processes of the launcher, None where it does not say."""
    command = arguments.command
    section: Values = {}
    top: Values = {"data": {}, command.section: section}
    named_alike(arguments, section, top)
    put(section, "model", model_source(arguments, "model.model_name_or_path"))
    if "model" not in section:
        raise arguments.refuse("model.model_name_or_path", "is missing; give a directory or a name on the hub")
    section |= {
        "optimizer": optimizer(arguments),
        "batch_size": arguments["train.batch_size"],
        "text": _text(arguments),
    }
    put(section, "lora", adapters(arguments))
    engine(arguments, section, "model")
    _ranks(arguments, section, launched)
    checkpoints(arguments, section)
    if command.name in _OWN:
        _OWN[command.name](arguments, section)
    data = data_source(
        arguments, "data.dataset", "data.dataset_probs", "data.dataset_split", _COLUMNS[command.dataset](arguments)
    )
    _evaluation(arguments, section, data)
    if command.name == "train_prm" and arguments["data.placeholder_token"] is not None:
        for part in data.get("sources", [data]):
            put(part, "step_marker", arguments["data.placeholder_token"])
    top["data"][command.dataset] = data
    tracking(arguments, top)
    return top


def _text(arguments: Arguments) -> Values:
    """How rows become tokens."""
    # OpenRLHF cuts what is too long and puts an end token there; here nothing follows a cut.
    arguments.note("data.max_len", "longer rows are cut, and nothing is put behind the cut")
    text: Values = {"truncation": "cut"}
    if "model.pretrain_mode_enable" in arguments:
        for name in ("data.apply_chat_template", "data.multiturn", "data.input_template", "data.output_key"):
            arguments.note(name, "no effect on plain text")
        arguments.note("data.tokenizer_chat_template", "no effect on plain text")
        return {**text, "format": "text"}
    if arguments["data.apply_chat_template"]:
        arguments.note("data.input_template", "no effect with a chat template, in OpenRLHF neither")
        if arguments.command.name == "train_sft":
            text["train_on"] = "all" if arguments["data.multiturn"] else "last"
            arguments.note("data.multiturn", "every turn of the assistant is trained on, which is the default here")
        return {**text, "format": "chat", **_chat_template(arguments)}
    arguments.note("data.tokenizer_chat_template", "no effect without --data.apply_chat_template")
    arguments.note("data.multiturn", "needs --data.apply_chat_template, in OpenRLHF too")
    return {**text, "format": "template", "input_template": input_template(arguments)}


def _chat_template(arguments: Arguments) -> Values:
    given = arguments["data.tokenizer_chat_template"]
    if not given:
        return {}
    if "{" in given:
        file = "chat_template.jinja"
        arguments.note("data.tokenizer_chat_template", f"a file here: save the template as {file}")
        return {"chat_template": file}
    return {"chat_template": given}


def input_template(arguments: Arguments) -> str:
    """The template of rows without a chat template; `{}`, the prompt alone, where there is none."""
    given = arguments["data.input_template"]
    if given and "{}" not in given:
        arguments.note(
            "data.input_template", "has no {} for the prompt, so that OpenRLHF takes none; neither is it here"
        )
    elif given and "\\n" in given:
        arguments.note("data.input_template", "holds a backslash and an n, which is no new line")
    return given if given and "{}" in given else "{}"


def share_ranks(arguments: Arguments, section: Values) -> int:
    """How ranks share layers or sequences. Returns how many share a sample."""
    tensor, sequence = arguments["ds.tensor_parallel_size"], arguments["ds.ring_attn_size"]
    if tensor > 1 and "lora" in section:
        arguments.note("ds.tensor_parallel_size", "not with adapters; ZeRO stage 3 divides the weights")
        tensor = 1
    if sequence > 1 and tensor > 1:
        arguments.note("ds.ring_attn_size", "ranks share layers or sequences, not both; they share layers")
        sequence = 1
    elif sequence > 1:
        arguments.note("ds.ring_attn_size", "Ulysses (trainer.sequence_parallel) divides the sequences instead")
        if arguments[
            "ds.packing_samples"
        ]:  # OpenRLHF packs with this kernel alone; here it is wanted for both together
            put(section, "trainer.attention", "flash_attention_2")
            for name in ("flash_attn", "ds.attn_implementation"):
                arguments.note(name, "packing takes flash_attention_2 in any case, in OpenRLHF too")
    put(section, "trainer.tensor_parallel", tensor)
    put(section, "trainer.sequence_parallel", sequence)
    return tensor * sequence


def _ranks(arguments: Arguments, section: Values, launched: int | None) -> None:
    """Processes, and how they share layers and sequences."""
    sharing = share_ranks(arguments, section)
    put(section, "trainer.ranks", launched or sharing)
    if launched is None:
        arguments.remark(
            "launcher",
            f"says no number of processes; set {arguments.command.section}.trainer.ranks to the accelerators there are",
        )


def _evaluation(arguments: Arguments, section: Values, data: Values) -> None:
    """Held-out rows, and how often they are looked at."""
    there = held_out(arguments, data, "eval.dataset", "eval.split")
    if not there and arguments.command.name == "train_rm":
        for part in data.get("sources", [data]):
            part["eval_share"] = _HELD_OUT_SHARE
        arguments.say(
            "eval.dataset", "none is given: a hundredth of the rows is held out, which OpenRLHF trains on as well"
        )
        there = True
    if arguments["eval.steps"] <= 0:
        return
    if there:
        put(section, "eval_steps", arguments["eval.steps"])
    else:
        arguments.note("eval.steps", "no effect without --eval.dataset, in OpenRLHF neither")


def _rm(arguments: Arguments, section: Values) -> None:
    if arguments["model.loss_type"] == "sigmoid":
        return
    section["loss"] = "log_exp"
    arguments.note("model.loss_type", "everything but sigmoid is log_exp in OpenRLHF")
    if section.pop("use_margin", False):
        arguments.note("model.margin_loss_enable", "no effect with this loss, in OpenRLHF neither")


def _prm(arguments: Arguments, section: Values) -> None:
    if arguments["data.placeholder_token"] is None:
        raise arguments.refuse("data.placeholder_token", "is missing, and OpenRLHF cannot do without either")
    section["reward_tokens"] = list(arguments["data.reward_tokens"] or ("+", "-"))
    if arguments["data.reward_tokens"] is None:
        arguments.say("data.reward_tokens", "none are given, for a loss over the whole vocabulary; + and - stand there")
    # The rows' own text, as train_prm had no chat template.
    arguments.note("data.reward_tokens", "for labels that are probabilities give prm.labels: soft")


def _dpo(arguments: Arguments, section: Values) -> None:
    reference = model_source(arguments, "ref.model_name_or_path")
    put(section, "reference", reference if reference != section["model"] else None)
    if reference == section["model"]:
        arguments.note("ref.model_name_or_path", "is the model that training starts from, which is the default")
    smoothing = arguments["model.label_smoothing"]
    if not arguments["model.ipo_enable"]:
        section["label_smoothing"] = smoothing
        return
    section["loss"] = "ipo"
    arguments.note("model.ipo_enable", "log-ratios are means over a response's tokens, sums in OpenRLHF: another beta")
    arguments.note("model.label_smoothing", "no effect with IPO, in OpenRLHF neither")


_OWN = {"train_rm": _rm, "train_prm": _prm, "train_dpo": _dpo}


def _sft_columns(arguments: Arguments) -> Values:
    prompt, response = arguments["data.input_key"], arguments["data.output_key"]
    if "model.pretrain_mode_enable" in arguments:
        return _mapped(text=prompt)
    if response:
        if "data.multiturn" in arguments:
            arguments.note("data.output_key", "turns in the column of prompts are not trained on")
        return _mapped(prompt=prompt, response=response)
    return _mapped(messages=prompt)


def _pair_columns(arguments: Arguments) -> Values:
    if arguments["data.prompt_key"] is None and not arguments["data.apply_chat_template"]:
        arguments.say(
            "data.prompt_key", "none is given: pairs of plain texts need a column of prompts, conversations do not"
        )
    return _mapped(
        prompt=arguments["data.prompt_key"],
        chosen=arguments["data.chosen_key"],
        rejected=arguments["data.rejected_key"],
    )


def _step_columns(arguments: Arguments) -> Values:
    return _mapped(input=arguments["data.input_key"], label=arguments["data.label_key"])


def _labelled_columns(arguments: Arguments) -> Values:
    return {**_sft_columns(arguments), **_mapped(label=arguments["data.label_key"])}


_COLUMNS = {"sft": _sft_columns, "pairs": _pair_columns, "steps": _step_columns, "labelled": _labelled_columns}


def _mapped(**columns: str | None) -> Values:
    """Our columns -> the source's, where they differ."""
    return {ours: theirs for ours, theirs in columns.items() if theirs is not None and theirs != ours}
