"""Operations on rows of logits, with a GPU kernel behind them; the utilities they are made of stay in their modules."""

from .api import IMPLEMENTATIONS, entropies_at, row_statistics
from .search import kth_largest, smallest_in_nucleus
from .statistics import TINY, RowStatistics, probability
from .xla import row_mass

__all__ = [
    "IMPLEMENTATIONS",
    "TINY",
    "RowStatistics",
    "entropies_at",
    "kth_largest",
    "probability",
    "row_mass",
    "row_statistics",
    "smallest_in_nucleus",
]
