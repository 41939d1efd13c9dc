"""Tensors in a file of this rank alone."""

__all__: list[str] = []
