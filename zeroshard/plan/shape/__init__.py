"""Transformers from their sizes: shapes, and the operations of their units."""

__all__: list[str] = []
