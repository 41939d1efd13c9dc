"""What notices that a rank is gone, stopped or slow, and tells the others: it knows no tensors."""

__all__: list[str] = []
