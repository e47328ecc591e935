"""Where train_ppo_ray's rewards come from."""

from flows.openrlhf.arguments import Arguments
from flows.openrlhf.common import Values

_SERVED = "http://127.0.0.1:5000/get_reward"


def reward(arguments: Arguments) -> Values:
    """The section `reward`: a Python function, a service, or a service that is to be started for a reward model.

    Raises SettingsError where no source is given: OpenRLHF would fail when it first asks for a reward.
    """
    remote, model, agent = (
        arguments[name] for name in ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")
    )
    if agent is not None:
        return _agent(arguments, agent)
    if remote:
        arguments.note("reward.model_name_or_path", "no effect beside a remote reward, in OpenRLHF neither")
        arguments.note("reward.normalize_enable", "no effect on a remote reward; the critic learns returns as they are")
        return _remote(remote)
    if not model:
        raise arguments.refuse("reward.remote_url", "is missing, and so is a reward model; give one of them")
    return _model(arguments, model)


def _remote(remote: str) -> Values:
    parts = [part.strip() for part in remote.split(",") if part.strip()]
    if len(parts) == 1 and parts[0].endswith(".py"):
        return {"functions": [{"path": parts[0]}]}
    return {"http": {"urls": [part if "://" in part else f"http://{part}" for part in parts]}}


def _model(arguments: Arguments, model: str) -> Values:
    """A reward model that no stage here has made is served."""
    first, *others = (part.strip() for part in model.split(","))
    if others:
        arguments.note("reward.model_name_or_path", f"one reward model: {first}; not {', '.join(others)}")
    normalize = " --normalize" if arguments["reward.normalize_enable"] else ""
    command = f"rlhf serve-reward --model {first} --no-token{normalize}"
    arguments.note("reward.model_name_or_path", f"start `{command}` beside the run (the model as a directory)")
    arguments.note(
        "reward.normalize_enable", "of the served model, by --normalize; the critic learns returns as they are"
    )
    return {"http": {"urls": [_SERVED]}}


def _agent(arguments: Arguments, agent: str) -> Values:
    arguments.note(
        "train.agent_func_path", f"agents are not here: {agent} is left out, and `exact` rewards the label's answer"
    )
    for name in ("reward.remote_url", "reward.model_name_or_path", "reward.normalize_enable"):
        arguments.note(name, "no effect beside an agent, in OpenRLHF neither")
    return {"exact": 1.0}
