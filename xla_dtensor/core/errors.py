"""The errors of the core: what was asked for, why it is refused, what to pass instead.

Both are `ValueError`s, so code written for PyTorch's checks keeps working.
"""


class LayoutError(ValueError):
    """Placements, partition specs, aliases or layout texts that describe no layout."""


class OpShardingError(ValueError):
    """An OpSharding (or its text) that XLA would not accept, or a question it cannot answer."""


class RulesError(LayoutError):
    """Sharding rules that cannot be read, or that do not fit the model or the mesh."""
