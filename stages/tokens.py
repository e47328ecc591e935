"""From a data artifact's rows to tokens, in the driver: once for all ranks, and errors and report before any starts."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.config.base import Settings
from rlhf_core.config.pipeline import SECTION_DATA
from rlhf_core.config.rl import PtxSettings
from rlhf_core.config.supervised import PrmSettings, RmSettings, SupervisedSettings
from stages.definition import StageContext

if TYPE_CHECKING:
    from rlhf_core.data.encode import EncodedData, Encoder
    from rlhf_core.data.token_cache import CachedTokens, TokenTable

FILES = {"train": "rows.jsonl", "eval": "eval.jsonl"}
FILL_STEPS = 20  # optimizer steps over which the fill rate of packed rows is measured


@dataclass(frozen=True)
class Tokens:
    """keys: split -> key in the store's token cache. counts: for the metrics. report: markdown for the UI."""

    keys: dict[str, str]
    counts: dict[str, int | float]
    report: str


def tokenise(context: StageContext, tokenizer: Any) -> Tokens:
    """The stage's rows as tokens in the store's cache, and data_report.json and plots/lengths.png in the artifact.

    Raises TokenError, one line with file and row, for a row or tokenizer that cannot be used.
    """
    from rlhf_core.data.encode import Encoder

    settings: SupervisedSettings = context.settings
    context.events.phase("tokenising")
    encoder = Encoder(tokenizer, settings.text, settings.max_len)
    (kind,) = SECTION_DATA[context.stage]
    encode, own = _encoding(encoder, kind, settings)
    splits = [split for split, file in FILES.items() if file in context.manifests["data"].files]
    cached = {split: _cached(context, encoder, "data", kind, FILES[split], encode, own) for split in splits}
    counts: dict[str, int | float] = {}
    for split, (_, one) in cached.items():
        prefix = "" if split == "train" else f"{split}_"
        counts |= {f"{prefix}{name}": figure for name, figure in one.report.figures().items()}
    if settings.trainer.packing:
        counts["fill_rate"] = first_fill_rate(cached["train"][1].table, settings)
    reports = {split: one.report for split, (_, one) in cached.items()}
    files = context.files
    files.mkdir(parents=True, exist_ok=True)
    content = {**counts, **{split: asdict(report) for split, report in reports.items()}}
    (files / "data_report.json").write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    reports["train"].plot(files / "plots" / "lengths.png")
    shown = "\n".join(report.to_markdown(held_out=split != "train") for split, report in reports.items())
    return Tokens({split: key for split, (key, _) in cached.items()}, counts, shown)


def tokenise_ptx(context: StageContext, tokenizer: Any) -> tuple[dict[str, str], dict[str, int | float]]:
    """The rows of PPO-ptx, of the input `ptx`: their key in the store's token cache by split, and counts of them."""
    from rlhf_core.data.encode import Encoder

    ptx: PtxSettings | None = context.settings.ptx
    if ptx is None:
        return {}, {}
    context.events.phase("tokenising")
    encoder = Encoder(tokenizer, ptx.text, ptx.max_len)
    key, cached = _cached(context, encoder, "ptx", "sft", FILES["train"], encoder.sft, {})
    return {"ptx": key}, {f"ptx_{name}": figure for name, figure in cached.report.figures().items()}


def _cached(
    context: StageContext,
    encoder: "Encoder",
    source: str,
    kind: str,
    file: str,
    encode: "Callable[..., EncodedData]",
    own: dict[str, Any],
) -> "tuple[str, CachedTokens]":
    """The rows of a file of the input `source`. encode: a method of `encoder`. own: what of the stage's settings their
    tokens depend on."""
    from rlhf_core.data.errors import TokenError
    from rlhf_core.data.rows import stream_jsonl
    from rlhf_core.data.token_cache import cached_tokens, token_key

    digest = context.manifests[source].files[file]
    key = token_key(kind, digest, encoder.tokenizer, encoder.chat_template, encoder.text, encoder.max_len, settings=own)
    try:
        path = context.inputs[source] / file
        # One row at a time, whatever their number.
        made = cached_tokens(
            context.store, key, context.scratch / "tokens", lambda sink: encode(stream_jsonl(path), into=sink).report
        )
        return key, made
    except TokenError as error:
        raise TokenError(f"{context.stage}: data.{kind}, {file}: {error}") from None


def _encoding(encoder: "Encoder", kind: str, settings: Settings) -> "tuple[Callable[..., EncodedData], dict[str, Any]]":
    """How rows of a kind are encoded, and what of the stage's settings that depends on."""
    if isinstance(settings, PrmSettings):
        names = {"placeholder_token", "reward_tokens", "separator", "labels"}
        return partial(encoder.steps, settings=settings), settings.model_dump(mode="json", include=names)
    if isinstance(settings, RmSettings):
        margin = settings.use_margin
        return partial(encoder.pairs, margin=margin), {"margin": margin}
    return {"sft": encoder.sft, "pairs": encoder.pairs, "labelled": encoder.labelled}[kind], {}


def first_fill_rate(table: "TokenTable", settings: SupervisedSettings) -> float:
    """The fill rate of packed rows over the first optimizer steps."""
    from rlhf_core.data.batches import SampleOrder
    from rlhf_core.data.layout import fill_rate

    lengths, order, size = table.lengths(), SampleOrder(len(table), settings.seed), settings.batch_size
    steps = [[int(lengths[i]) for i in order.ids(step * size, size)] for step in range(FILL_STEPS)]
    return fill_rate(steps, settings.max_len * len(table.item(0).samples))
