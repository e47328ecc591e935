"""`python -m flows.guardian PARENT SCRATCH COMMAND...`: runs a driver, and lets nothing that it started outlive it.

The supervisor starts its driver through this small single-threaded process, because two things are only safe or only
possible here: a preexec function (the supervisor has threads), and outliving a supervisor that was killed with SIGKILL
long enough to end descendants that moved to sessions of their own, as Ray's and vLLM's do, and to remove their files.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from flows.processes import become_subreaper, die_with_parent, end_descendants
from rlhf_core.cluster.leftovers import attempt_name, remove_leftovers

GRACE_S = 10.0
SPEC, LOG, EVENTS = "spec.json", "driver.log", "events.jsonl"


class _Ended(BaseException):
    """SIGTERM came: from the supervisor, or from the kernel because the supervisor has gone."""


def main(parent: int, scratch: Path, command: list[str]) -> int:
    """Run `command`; returns its exit code, 128 + n when signal n ended it, 143 when this process was told to end."""
    become_subreaper()
    signal.signal(signal.SIGTERM, _on_terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guardian = os.getpid()
    code = 128 + signal.SIGTERM
    try:
        die_with_parent(signal.SIGTERM, parent)
        driver = subprocess.Popen(command, preexec_fn=lambda: _prepare_driver(guardian))
        code = driver.wait()
    except _Ended:
        pass
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error}\n")
        code = 127
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Without a supervisor nobody waits for a tidy end, and the next run of the stage may start at any moment.
    end_descendants(guardian, GRACE_S if os.getppid() == parent else 0.0)
    remove_files(scratch)
    return code if code >= 0 else 128 - code


def remove_files(scratch: Path) -> None:
    """Remove what an attempt leaves, but what explains it: its spec, log and events."""
    remove_leftovers(attempt_name(scratch))
    for path in scratch.iterdir():
        if path.name in (SPEC, LOG, EVENTS):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _prepare_driver(guardian: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL, guardian)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise _Ended


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
