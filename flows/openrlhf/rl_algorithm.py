"""train_ppo_ray's estimator, loss, KL, corrections and shaping."""

from flows.openrlhf.arguments import Arguments
from flows.openrlhf.common import Values, put

# Estimators whose scalar is a difference to a group's mean: OpenRLHF clips that, and not the reward.
GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
_NORMALISED = ("gae", "reinforce", "reinforce_baseline")


def algorithm(arguments: Arguments, section: Values) -> Values:
    """The section `algorithm`, with what `section` has of it already."""
    values: Values = section.get("algorithm", {})
    values |= _estimator(arguments)
    values |= _loss(arguments)
    _kl(arguments, values)
    _mismatch(arguments, values)
    _shaping(arguments, values, section["rollout"]["max_new_tokens"])
    _filtering(arguments)
    return values


def _estimator(arguments: Arguments) -> Values:
    name = arguments["algo.advantage.estimator"]
    values: Values = {"estimator": name, "normalise": "mean_std" if name in _NORMALISED else "none"}
    if name == "flash_reinforce":
        # The mean of the whole rollout is what `normalise: mean` takes off, over tokens.
        values |= {"estimator": "reinforce", "normalise": "mean"}
        arguments.note("algo.advantage.estimator", "reinforce less the mean over the rollout's tokens, not its samples")
    if name not in _NORMALISED:
        arguments.note("algo.advantage.no_std_norm", f"no effect with the estimator {name}, in OpenRLHF neither")
    elif arguments["algo.advantage.no_std_norm"]:
        values["normalise"] = "mean"
    if name in ("gae", "reinforce"):
        values["gamma"] = arguments["algo.advantage.gamma"]
    else:
        arguments.note("algo.advantage.gamma", f"no effect with the estimator {name}, in OpenRLHF neither")
    if name == "gae":
        values |= {"gae_lambda": arguments["algo.advantage.lambd"], "value_clip": arguments["critic.value_clip"]}
    return values


def _loss(arguments: Arguments) -> Values:
    low, high = arguments["actor.eps_clip_low_high"] or (arguments["actor.eps_clip"],) * 2
    if "actor.eps_clip_low_high" in arguments:
        arguments.note("actor.eps_clip", f"no effect beside {arguments.spelt('actor.eps_clip_low_high')}")
    sequences = arguments["actor.loss_agg_mode"] == "seq-mean-token-mean"
    values: Values = {
        "loss": {"ppo": "clip", "gspo": "gspo"}[arguments["actor.policy_loss_type"]],
        "clip_low": low,
        "clip_high": high,
        "aggregation": "sequence_mean" if sequences or arguments["actor.policy_loss_type"] == "gspo" else "token_mean",
        "entropy_coef": arguments["actor.entropy_coef"] or 0.0,
    }
    if arguments["actor.policy_loss_type"] == "gspo":
        arguments.note("actor.loss_agg_mode", "no effect: GSPO is a mean over sequences, in OpenRLHF too")
    if arguments["actor.entropy_coef"] == 0:
        arguments.note("actor.entropy_coef", "the entropy is measured in every run")
    bound = arguments["actor.dual_clip"]
    if bound is not None and bound > 1 + high:
        values["dual_clip"] = bound
    elif bound is not None:
        arguments.note("actor.dual_clip", f"{bound:g} is not above the ratio's upper bound {1 + high:g}; left out")
    return values


def _kl(arguments: Arguments, values: Values) -> None:
    """OpenRLHF's penalty on each token's reward, or its term of the loss."""
    coef, estimator = arguments["algo.kl.init_coef"], arguments["algo.kl.estimator"]
    in_loss, unbiased = arguments["algo.kl.use_loss"], arguments["algo.kl.unbiased_gradient"]
    flags = ("target", "horizon", "estimator", "use_loss", "unbiased_gradient")
    if not coef:
        for name in flags:
            arguments.note(f"algo.kl.{name}", "no effect without a KL coefficient")
        return
    if in_loss and estimator == "k1" and not unbiased:
        estimator = "k2"
        arguments.say(
            "algo.kl.estimator", "k1 in the loss has a gradient of mean 0; k2, whose gradient is that of the KL"
        )
    put(values, "kl.estimator", estimator)
    put(values, "kl.place", "loss" if in_loss else "reward")
    if in_loss:
        put(values, "kl.unbiased_gradient", unbiased)
    else:
        arguments.note("algo.kl.unbiased_gradient", "no effect on a penalty on the reward")
    if arguments["algo.kl.target"]:
        put(values, "kl.target", arguments["algo.kl.target"])
        put(values, "kl.horizon", arguments["algo.kl.horizon"])
        arguments.note("algo.kl.target", "of a trajectory's KL, the sum over its tokens")
    else:
        arguments.note("algo.kl.horizon", f"no effect without {arguments.spelt('algo.kl.target')}")
        arguments.note("algo.kl.target", "0 adapts nothing")


# Names of 0.10 and 0.11.0 -> level, mode.
_CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
_PREFIX = "algo.advantage.is_correction_"


def _mismatch(arguments: Arguments, values: Values) -> None:
    """Importance weights against the sampler's log-probs."""
    level, mode, statistic = (arguments[_PREFIX + part] for part in ("level", "mode", "gating"))
    if arguments["enable_vllm_is_correction"]:
        level, mode = _CORRECTIONS[arguments["vllm_is_correction_type"]]
        for part in ("level", "mode"):
            arguments.note(_PREFIX + part, f"no effect beside {arguments.spelt('vllm_is_correction_type')}")
    else:
        arguments.note("vllm_is_correction_type", "no effect without the correction")
    band = arguments[f"{_PREFIX}threshold"]
    if level == "off":
        for part in ("mode", "gating", "threshold"):
            arguments.note(_PREFIX + part, "no effect without the correction")
        return
    if mode == "clip" and statistic != "ratio":
        arguments.note(f"{_PREFIX}gating", "a weight that is clipped is the ratio's")
        statistic = "ratio"
    if arguments["actor.policy_loss_type"] == "gspo":
        arguments.say(
            f"{_PREFIX}level", "with GSPO OpenRLHF corrects nothing and takes the sampler's log-probs as old ones"
        )
    low, high = (0.0, *band) if len(band) == 1 else band
    settings = {
        "level": {"seq": "sequence"}.get(level, level),
        "mode": mode,
        "statistic": statistic,
        "low": low,
        "high": high,
    }
    values["mismatch"] = settings


def _shaping(arguments: Arguments, values: Values, max_new_tokens: int) -> None:
    """Bounds of rewards and the overlong penalty."""
    estimator = arguments["algo.advantage.estimator"]
    if estimator not in GROUPS or "reward.clip_range" in arguments:
        put(values, "shaping.clip", list(arguments["reward.clip_range"]))
    if estimator in GROUPS:
        arguments.note("reward.clip_range", "of the reward, before its group's mean is taken off")
    window, factor = arguments["reward.overlong_buffer_len"], "reward.overlong_penalty_factor"
    if window is not None and 0 < window < max_new_tokens:
        put(values, "shaping.overlong_share", window / max_new_tokens)
        put(values, "shaping.overlong_factor", arguments[factor])
        return
    if window:
        arguments.note(
            "reward.overlong_buffer_len", f"is not below the {max_new_tokens} tokens of a response; left out"
        )
    arguments.note(factor, "no effect without an overlong window")


def _filtering(arguments: Arguments) -> None:
    band = "algo.dynamic_filtering_range"
    if not arguments["algo.dynamic_filtering_enable"]:
        arguments.note(band, f"no effect without {arguments.spelt('algo.dynamic_filtering_enable')}")
        return
    text = "groups whose scores are all equal are replaced; OpenRLHF goes by the mean, strictly within the range"
    arguments.note(band if band in arguments else "algo.dynamic_filtering_enable", text)
