"""What a stage's driver is given: one JSON file, complete and without secrets."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_core.config.base import SettingsError
from rlhf_core.config.pipeline import RunSettings


class StageSpec(BaseModel):
    """`python -m stages.<module> --spec FILE` reads this."""

    model_config = ConfigDict(extra="forbid")

    stage: str  # e.g. "sft"
    node: str  # its name in the pipeline, e.g. "data-pairs" for a run of prepare-data
    settings: dict[str, Any]  # of the stage's settings model
    key: str
    key_source: dict[str, Any]
    inputs: dict[str, dict[str, Any]]  # input name -> manifest of the artifact
    run: RunSettings
    scratch: str = ""  # this attempt's own directory; empty: one is made below run.scratch
    lease: int | None = None  # number of the lease that the caller holds; None: the driver takes one
    flow_run: dict[str, Any] = {}  # who asked: {"id", "name", "parent"}; empty when run by hand


def read_spec(path: str | Path) -> StageSpec:
    try:
        return StageSpec.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise SettingsError(f"spec file {path} does not exist; --spec wants the JSON that the workflow wrote") from None
    except json.JSONDecodeError as error:
        raise SettingsError(f"spec file {path} is not JSON: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SettingsError(f"spec file {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
