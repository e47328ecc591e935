"""What a stage leaves outside its scratch directory, named so that whoever outlives its processes can remove it.

Ray wants a directory with a short path, weights go through shared memory: neither can lie in the scratch directory, and
a driver that is killed removes neither.
"""

import hashlib
import os
import shutil
from pathlib import Path

# Set by the supervisor for the driver. A stage that runs alone has none and removes its directories itself.
ATTEMPT = "RLHF_ATTEMPT"
ROOTS = (Path("/tmp"), Path("/dev/shm"))


def attempt_name(scratch: Path) -> str:
    """The name of the attempt whose scratch directory this is. Short: it enters the paths of Ray's sockets."""
    return hashlib.sha256(os.fsencode(scratch.absolute())).hexdigest()[:10]


def directory_prefix(kind: str) -> str:
    """How the name of a directory below one of ROOTS has to begin."""
    return f"rlhf-{kind}-{os.environ.get(ATTEMPT) or os.getpid()}-"


def leftovers(attempt: str) -> list[Path]:
    """The directories of that attempt which are there."""
    return sorted(path for root in ROOTS for path in root.glob(f"rlhf-*-{attempt}-*"))


def remove_leftovers(attempt: str) -> None:
    """Call it when the attempt's processes have ended."""
    for path in leftovers(attempt):
        shutil.rmtree(path, ignore_errors=True)
