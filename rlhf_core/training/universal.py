"""DeepSpeed's universal checkpoint: what ranks of one number wrote, for ranks of another to load.

Loads without torch: the driver converts, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

ENGINE_DIRECTORY = "engine"  # below a TrainEngine's directory: what DeepSpeed wrote
_PARAMETERS = "zero"  # in a universal checkpoint: a directory for each parameter


class ConversionError(Exception):
    """A training checkpoint that could not be converted. The message holds the end of the converter's output."""


def is_universal(directory: Path) -> bool:
    return (directory / ENGINE_DIRECTORY / _PARAMETERS).is_dir()


def convert_all(checkpoint: Path) -> None:
    """Converts what each engine of a training checkpoint's local copy wrote, in place.

    Raises ConversionError. All other files stay: they do not depend on the number of ranks.
    """
    for engine in sorted(path for path in checkpoint.rglob(ENGINE_DIRECTORY) if path.is_dir()):
        _convert(engine)


def _convert(engine: Path) -> None:
    converted = engine.with_name("universal")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    # Relative names: the converter takes the paths it is given for patterns and regular expressions.
    paths = ["--input_folder", engine.name, "--output_folder", converted.name]
    # ZeRO-1 and -2 write no description of the model's layout, which the converter then takes for the plain one.
    options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [*command, *paths, *options], cwd=engine.parent, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise ConversionError(
            f"{engine}: DeepSpeed's conversion ended with {done.returncode}: {' '.join(done.stderr.split())[-500:]}"
        )
    for path in sorted(engine.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    engine.rmdir()
    converted.rename(engine)
