"""What a row is once it is tokens: an item of one or several samples that are trained on together. NumPy alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of T tokens as it goes through the model.

    ids: (T,) int32. weights: (T,) float32, how much each token counts as a target; 0 is context, and ids[0], which
    nothing precedes, always is. labels: (T,) float32 or None; what is learned where weights > 0 (a step's verdict),
    where it is not the token itself.
    """

    ids: np.ndarray
    weights: np.ndarray
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Item:
    """What one row gives to an optimizer step: a response, a (chosen, rejected) pair, with scalars such as `margin`.

    All items of a data set have the same number of samples, in the same roles, and the same scalars.
    """

    samples: tuple[Sample, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))
