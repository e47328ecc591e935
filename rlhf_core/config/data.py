"""Where each data set comes from: generated arithmetic problems, or a file with named columns."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings

DatasetKind = Literal["sft", "pairs", "steps", "prompts", "eval"]

# The columns that prepare-data writes for each data set, whatever the source's columns are called.
DATASET_COLUMNS: dict[str, tuple[str, ...]] = {
    "sft": ("prompt", "response"),
    "pairs": ("prompt", "chosen", "rejected"),
    "steps": ("prompt", "steps", "labels"),
    "prompts": ("prompt", "label"),
    "eval": ("prompt", "label"),
}


class ArithmeticSource(Settings):
    """Sums with worked steps, a pure function of these fields (rlhf_core/data/arithmetic.py)."""

    rows: int = Field(gt=0, description="Rows to make from the training problems.")
    eval_rows: int = Field(default=0, ge=0, description="Held-out rows beside them, made from held-out problems.")
    seed: int = Field(default=0, ge=0, description="Seed of the drawing.")
    max_number: int = Field(default=9, ge=1, le=999, description="Largest number in a sum.")
    terms: tuple[int, ...] = Field(default=(2, 3), description="How many numbers a sum may have.")


class DataSource(Settings):
    """One data set: `arithmetic`, or `path` to a JSON, JSONL, CSV or Parquet file (local or s3://)."""

    arithmetic: ArithmeticSource | None = Field(default=None, description="Generate the demo's sums.")
    path: Annotated[str | None, Neutral] = Field(
        default=None, description="File with the rows; its content is in the key."
    )
    eval_path: Annotated[str | None, Neutral] = Field(default=None, description="File with held-out rows.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our column name -> the file's, where they differ, e.g. {response: output}."
    )
    max_rows: int | None = Field(default=None, gt=0, description="Use the first rows only.")

    @model_validator(mode="after")
    def _one_source(self) -> "DataSource":
        if (self.arithmetic is None) == (self.path is None):
            raise ValueError("give exactly one of `arithmetic` and `path`")
        if self.arithmetic is not None and (self.eval_path or self.columns or self.max_rows):
            raise ValueError("`eval_path`, `columns` and `max_rows` belong to `path`; use `rows`, `eval_rows` here")
        return self


class DataSettings(Settings):
    """The data sets of a pipeline; each becomes an artifact of its own."""

    sft: DataSource = Field(description="prompt, response")
    pairs: DataSource = Field(description="prompt, chosen, rejected; with held-out rows for the RM's accuracy")
    steps: DataSource | None = Field(default=None, description="prompt, steps, labels: step-labelled solutions")
    prompts: DataSource = Field(description="prompt, label: what the policy is trained on")
    eval: DataSource = Field(description="prompt, label: held-out prompts for greedy exact match")

    @model_validator(mode="after")
    def _known_columns(self) -> "DataSettings":
        for kind, columns in DATASET_COLUMNS.items():
            source: DataSource | None = getattr(self, kind)
            unknown = sorted(set(source.columns) - set(columns)) if source else []
            if unknown:
                raise ValueError(f"{kind}.columns maps {', '.join(unknown)}; this data set has {', '.join(columns)}")
        return self

    @model_validator(mode="after")
    def _held_out_pairs(self) -> "DataSettings":
        generated = self.pairs.arithmetic
        if not (generated.eval_rows if generated is not None else self.pairs.eval_path):
            wanted = "pairs.arithmetic.eval_rows" if generated is not None else "pairs.eval_path"
            raise ValueError(
                "pairs has no held-out rows, and the reward model's accuracy and normalisation are measured on them; "
                f"give {wanted}"
            )
        return self


class PrepareDataSettings(Settings):
    """What one run of the stage prepare-data is given: which data set, and its source."""

    dataset: DatasetKind = Field(description="Which data set this is.")
    source: DataSource = Field(description="Where its rows come from.")
