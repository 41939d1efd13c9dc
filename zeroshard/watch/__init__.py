"""Detection and reporting of ranks that ended, stopped or became slow. Knows no tensors."""

__all__: list[str] = []
