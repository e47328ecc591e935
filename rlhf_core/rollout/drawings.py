"""Responses drawn offline, in parts that a restart finds again in the store."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_core.data.batches import chunks
from rlhf_core.rollout.sample import Sample, SampleRequest
from rlhf_core.store.leases import Lease
from rlhf_core.store.store import Store

Progress = Callable[[int, int], None]  # (done, of all)


@dataclass(frozen=True, eq=False)
class Drawing:
    """A response as sampled: token ids (R,), its end included, and whether it was cut off."""

    ids: np.ndarray
    truncated: bool


@dataclass(frozen=True)
class KeptDrawings:
    """Parts of a stage's samples in the store, training/<stage>/<key>/samples/<phase>-000003.npz.

    What a part holds is a function of the stage's key, so whoever holds the lease may write it, and read it later.
    """

    store: Store
    stage: str
    key: str
    lease: Lease

    def read(self, phase: str, part: int) -> list[Drawing] | None:
        """None where the part is not there."""
        try:
            content = self.store.read_bytes(self._path(phase, part))
        except FileNotFoundError:
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            pieces = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1])
            return [Drawing(ids, bool(cut)) for ids, cut in zip(pieces, arrays["truncated"], strict=True)]

    def write(self, phase: str, part: int, drawings: Sequence[Drawing]) -> None:
        """Raises LeaseLost where another run has taken over."""
        content = io.BytesIO()
        np.savez(
            content,
            ids=np.concatenate([one.ids for one in drawings]),
            lengths=np.array([len(one.ids) for one in drawings]),
            truncated=np.array([one.truncated for one in drawings]),
        )
        self.lease.check()
        self.store.write_bytes(self._path(phase, part), content.getvalue())

    def _path(self, phase: str, part: int) -> str:
        return f"training/{self.stage}/{self.key}/samples/{phase}-{part:06d}.npz"


def draw(
    ask: Callable[[Sequence[SampleRequest]], Sequence[Sample]],
    requests: Sequence[SampleRequest],
    kept: KeptDrawings,
    phase: str,
    part_size: int,
    progress: Progress,
) -> list[Drawing]:
    """A response for each request, those of the parts that `kept` has already without asking for them again."""
    found: list[Drawing] = []
    for part, own in enumerate(chunks(requests, part_size)):
        drawings = kept.read(phase, part)
        if drawings is None:
            drawings = [Drawing(np.array(one.token_ids, np.int32), one.finish_reason == "length") for one in ask(own)]
            kept.write(phase, part, drawings)
        found += drawings
        progress(len(found), len(requests))
    return found
