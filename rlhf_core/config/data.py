"""Where each data set comes from: files, a folder, a loader, the Hugging Face hub, generated sums, or a mixture."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Neutral, Settings
from rlhf_core.config.shapes import SHAPES, DatasetKind, ShapeName, columns_of

__all__ = [
    "ArithmeticSource",
    "DataSettings",
    "DataSource",
    "DatasetKind",
    "PrepareDataSettings",
    "Source",
    "SourceFields",
]


class ArithmeticSource(Settings):
    """Sums with worked steps, a pure function of these fields (rlhf_core/data/arithmetic.py)."""

    rows: int = Field(gt=0, description="Rows to make from the training problems.")
    eval_rows: int = Field(default=0, ge=0, description="Held-out rows beside them, made from held-out problems.")
    seed: int = Field(default=0, ge=0, description="Seed of the drawing.")
    max_number: int = Field(default=9, ge=1, le=999, description="Largest number in a sum.")
    terms: tuple[int, ...] = Field(default=(2, 3), description="How many numbers a sum may have.")


class SourceFields(Settings):
    """One source of rows: exactly one of `path`, `hub` and `arithmetic`."""

    arithmetic: ArithmeticSource | None = Field(default=None, description="Generate the demo's sums.")
    path: Annotated[str | None, Neutral] = Field(
        default=None,
        description="JSON, JSONL, CSV, Parquet or Arrow file, a save_to_disk folder, or a .py file with load_rows; "
        "local or s3://. Its content is in the key.",
    )
    hub: str | None = Field(default=None, description="Data set on the Hugging Face hub, e.g. org/name.")
    revision: Annotated[str | None, Neutral] = Field(
        default=None, description="Branch, tag or commit on the hub; the commit it stands for is in the key."
    )
    subset: str | None = Field(default=None, description="Configuration of a hub data set.")
    split: str | None = Field(
        default=None, description="Split to train on where the source has several; null: train, or the only one."
    )
    eval_path: Annotated[str | None, Neutral] = Field(default=None, description="File or folder with held-out rows.")
    eval_hub: str | None = Field(default=None, description="Data set on the Hugging Face hub with held-out rows.")
    eval_revision: Annotated[str | None, Neutral] = Field(
        default=None, description="Branch, tag or commit of eval_hub; the commit it stands for is in the key."
    )
    eval_subset: str | None = Field(default=None, description="Configuration of eval_hub.")
    eval_split: str | None = Field(
        default=None,
        description="Split with held-out rows: of eval_path or eval_hub where one is given, else of the same source.",
    )
    eval_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Hold out about this share of the rows, by a hash of their prompt: the same in any order.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our column name -> the source's, where they differ: {response: output}."
    )
    shape: ShapeName | None = Field(
        default=None, description="Which shape the rows have, where their columns fit several."
    )
    step_marker: str = Field(default="ки", min_length=1, description="What ends each step in rows of shape markers.")
    max_samples: int | None = Field(default=None, gt=0, description="Use the first rows only.")

    @property
    def has_held_out(self) -> bool:
        generated = self.arithmetic is not None and self.arithmetic.eval_rows > 0
        return generated or any((self.eval_path, self.eval_hub, self.eval_split, self.eval_share))

    @property
    def name(self) -> str:
        """What a message or report calls this source."""
        return self.path or (_hub_name(self.hub, self.subset) if self.hub else "arithmetic")

    @property
    def eval_name(self) -> str:
        """The same of where its held-out rows come from, if not a share of the others."""
        other = self.eval_path or (_hub_name(self.eval_hub, self.eval_subset) if self.eval_hub else self.name)
        return f"{other} ({self.eval_split})" if self.eval_split else other


def _hub_name(name: str, subset: str | None) -> str:
    return f"{name} ({subset})" if subset else name


class Source(SourceFields):
    """One of a mixture's sources."""

    probability: float | None = Field(
        default=None, gt=0, lt=1, description="How often the mixture draws from it; null: its rows are taken once."
    )
    label: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+$",
        description="What evaluations call its prompts; null: the hub's name, arithmetic or file, numbered from the "
        "second of one name on.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "Source":
        _check_source(self)
        return self


class DataSource(SourceFields):
    """One data set: one source, or several as `sources`."""

    sources: tuple[Source, ...] = Field(
        default=(), description="Several sources, one after the other, or drawn from by their `probability`."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the drawing from a mixture's sources.")
    on_bad_row: Literal["refuse", "drop"] = Field(
        default="refuse", description="A row that cannot be read: stop and name it, or leave it out and count it."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "DataSource":
        if not self.sources:
            _check_source(self)
            return self
        beside = [name for name in _given(self) if name in SourceFields.model_fields and name != "max_samples"]
        if beside:
            raise ValueError(f"{_quoted(beside)} cannot stand beside `sources`; give it to one of them")
        drawn = [source.probability for source in self.sources if source.probability is not None]
        if drawn and len(drawn) < len(self.sources):
            raise ValueError("give every one of `sources` a `probability`, or none of them")
        if drawn and not math.isclose(sum(drawn), 1, abs_tol=1e-6):
            raise ValueError(f"the probabilities of `sources` sum to {sum(drawn):g}; they must sum to 1")
        return self

    @property
    def parts(self) -> tuple[SourceFields, ...]:
        return self.sources or (self,)

    @property
    def labels(self) -> list[str]:
        """Of `sources`. Nothing of a path is in them: where a file lies is in no key, and what a row holds is."""
        names: list[str] = []
        for source in self.sources:
            kind = "arithmetic" if source.arithmetic is not None else "file"
            name = kind if source.hub is None else source.hub.rpartition("/")[2]
            before = sum(one == name or one.startswith(f"{name}-") for one in names)
            names.append(source.label or (f"{name}-{before + 1}" if before else name))
        return names

    @property
    def named_parts(self) -> list[tuple[str, SourceFields]]:
        """(prefix of its settings' names, source) of each part: "" for the only one, else "sources.0." and so on."""
        return [(f"sources.{n}." if self.sources else "", part) for n, part in enumerate(self.parts)]


_OF_FILES = (
    "split",
    "eval_path",
    "eval_hub",
    "eval_split",
    "eval_share",
    "columns",
    "shape",
    "step_marker",
    "max_samples",
)


def _given(source: SourceFields) -> list[str]:
    """Names of the fields that are not at their default."""
    fields = type(source).model_fields
    return [n for n, field in fields.items() if getattr(source, n) != field.get_default(call_default_factory=True)]


def _check_source(source: SourceFields) -> None:
    """Raises ValueError for fields that contradict each other."""
    if sum(given is not None for given in (source.path, source.hub, source.arithmetic)) != 1:
        more = " (or `sources`)" if isinstance(source, DataSource) else ""
        raise ValueError(f"give exactly one of `path`, `hub` and `arithmetic`{more}")
    read = [name for name in _given(source) if name in _OF_FILES]
    if source.arithmetic is not None and read:
        raise ValueError(f"{_quoted(read)} belongs to `path` and `hub`; use `rows` and `eval_rows` with `arithmetic`")
    if source.hub is None and (source.revision or source.subset):
        raise ValueError("`revision` and `subset` belong to `hub`")
    if source.eval_hub is None and (source.eval_revision or source.eval_subset):
        raise ValueError("`eval_revision` and `eval_subset` belong to `eval_hub`")
    other = source.eval_path or source.eval_hub
    if (source.eval_share is not None and (other or source.eval_split)) or (source.eval_path and source.eval_hub):
        raise ValueError(
            "give one of `eval_share`, `eval_path` and `eval_hub`, the last two with or without `eval_split`: held-out "
            "rows come from one place"
        )
    if _holds_out_itself(source):
        raise ValueError(
            f"the held-out rows are the training rows: `split` and `eval_split` both mean {source.split or 'train'} of "
            f"{source.name}; give two splits or files, or `eval_share`"
        )


def _holds_out_itself(source: SourceFields) -> bool:
    """Whether the held-out rows are those of the training split; where there are several, none given means train."""
    if source.eval_path is not None:
        same_place, asked = source.eval_path == source.path, True
    elif source.eval_hub is not None:
        places = (
            (source.hub, source.revision, source.subset),
            (source.eval_hub, source.eval_revision, source.eval_subset),
        )
        same_place, asked = places[0] == places[1], True
    else:
        same_place, asked = True, source.eval_split is not None
    return asked and same_place and (source.split or "train") == (source.eval_split or "train")


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class DataSettings(Settings):
    """The data sets of a pipeline; each becomes an artifact of its own. Give those that its stages read."""

    sft: DataSource | None = Field(default=None, description="Prompts and responses, conversations, or plain text.")
    pairs: DataSource | None = Field(
        default=None, description="Preference pairs; the reward model wants held-out rows of them."
    )
    labelled: DataSource | None = Field(default=None, description="Responses labelled good or bad, for KTO.")
    steps: DataSource | None = Field(default=None, description="Step-labelled solutions, for the process reward model.")
    prompts: DataSource | None = Field(default=None, description="prompt, label: what the policy is trained on.")
    eval: DataSource | None = Field(default=None, description="prompt, label: held-out prompts for greedy exact match.")

    @model_validator(mode="after")
    def _known_columns(self) -> "DataSettings":
        for kind in SHAPES:
            data: DataSource | None = getattr(self, kind)
            if data is not None:
                _check_columns(kind, data, kind)
        return self


def _check_columns(kind: DatasetKind, data: DataSource, where: str) -> None:
    """Raises ValueError for a column or shape that this data set does not have."""
    shapes = {shape.name: shape for shape in SHAPES[kind]}
    for prefix, source in data.named_parts:
        if source.shape is not None and source.shape not in shapes:
            raise ValueError(f"{where}.{prefix}shape is {source.shape}; this data set has {', '.join(shapes)}")
        allowed = shapes[source.shape].columns if source.shape is not None else columns_of(kind)
        unknown = sorted(set(source.columns) - set(allowed))
        if unknown:
            raise ValueError(
                f"{where}.{prefix}columns maps {', '.join(unknown)}; this data set has {', '.join(allowed)}"
            )


class PrepareDataSettings(Settings):
    """What one run of the stage prepare-data is given: which data set, and its source."""

    dataset: DatasetKind = Field(description="Which data set this is.")
    source: DataSource = Field(description="Where its rows come from.")
