"""A sandbox's process: reads calls from the driver, one JSON line each, and answers with outcomes. Loads no torch.

`python -m rlhf_core.rollout.sandbox_worker PARENT`, started by rlhf_core/rollout/sandbox.py. What the called code
prints goes to the driver's standard error. Each answer repeats its message's id, which the called code is not given.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rlhf_core.rollout import verifiers
from rlhf_core.rollout.code_runner import run_tests
from rlhf_core.rollout.outcomes import Failed, Outcome, Scored, finite, one_line
from rlhf_core.rollout.privileges import refuse_tracing
from rlhf_core.rollout.process_tree import adopt_orphans, end_with_parent
from rlhf_core.rollout.reward_functions import UserFunction, load_function, read_score


def main(parent: int) -> None:
    refuse_tracing()
    _tie_to(parent)
    calls, answers = _channel()
    setup = json.loads(calls.readline())
    try:
        functions = {name: load_function(**given) for name, given in setup["functions"].items()}
        for module in setup["modules"]:
            __import__(module)
    except BaseException as error:  # noqa: BLE001  whatever a user's file raises, an exit included
        _answer(answers, setup["id"], {"error": f"{type(error).__name__}: {one_line(error)}"})
        return
    _answer(answers, setup["id"], {"ready": True})
    for line in calls:
        call = json.loads(line)
        _answer(answers, call["id"], {"outcomes": [asdict(one) for one in _outcomes(call, functions)]})


def _outcomes(call: dict[str, Any], functions: dict[str, UserFunction]) -> list[Outcome]:
    try:
        if call["kind"] == "function":
            return [finite(one) for one in functions[call["name"]](**call["arguments"])]
        found = _VERIFIERS[call["kind"]](**call["arguments"])
        return [finite(found if isinstance(found, Scored | Failed) else Scored(found))]
    except MemoryError:
        return [Failed("memory", "out of memory")] * call["size"]
    except BaseException as error:  # noqa: BLE001  whatever the called code raises, an exit included
        return [Failed("error", f"{type(error).__name__}: {one_line(error)}")] * call["size"]


_VERIFIERS: dict[str, Callable[..., Outcome | float]] = {
    "math": verifiers.math,
    "regex": verifiers.regex,
    "json_schema": verifiers.json_schema,
    "code": run_tests,
    "read_score": read_score,
}


def _answer(answers: io.BufferedWriter, call_id: str, message: dict[str, Any]) -> None:
    answers.write(json.dumps({"id": call_id} | message).encode() + b"\n")
    answers.flush()


def _channel() -> tuple[io.BufferedReader, io.BufferedWriter]:
    """Standard input and output, moved to where the called code does not print or read."""
    calls, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return open(calls, "rb"), open(answers, "wb")


def _tie_to(parent: int) -> None:
    """This process ends with the driver's thread that started it; orphans of its children become its own."""
    end_with_parent(signal.SIGKILL)
    adopt_orphans()
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
