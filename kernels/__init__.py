"""Row statistics of logits: the only code that reads whole rows of the vocabulary."""

from .api import IMPLEMENTATIONS, entropies_at, row_statistics
from .blocks import (
    BLOCK,
    argmax_and_max,
    block_sums,
    first_true,
    gather_elements,
    gather_rows,
    to_key,
)
from .search import kth_largest, largest_passing, smallest_in_nucleus
from .statistics import TINY, RowStatistics, probability, shift_of
from .xla import mask_columns, row_mass

__all__ = [
    "BLOCK",
    "IMPLEMENTATIONS",
    "TINY",
    "RowStatistics",
    "argmax_and_max",
    "block_sums",
    "entropies_at",
    "first_true",
    "gather_elements",
    "gather_rows",
    "kth_largest",
    "largest_passing",
    "mask_columns",
    "probability",
    "row_mass",
    "row_statistics",
    "shift_of",
    "smallest_in_nucleus",
    "to_key",
]
