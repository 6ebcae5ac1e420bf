"""Row statistics of logits: the only code that reads whole rows of the vocabulary."""

from .xla import (
    BLOCK,
    RowStatistics,
    block_sums,
    first_true,
    gather_elements,
    gather_rows,
    mask_columns,
    row_mass,
    row_statistics,
    top_values,
)

__all__ = [
    "BLOCK",
    "RowStatistics",
    "block_sums",
    "first_true",
    "gather_elements",
    "gather_rows",
    "mask_columns",
    "row_mass",
    "row_statistics",
    "top_values",
]
