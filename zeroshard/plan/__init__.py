"""Predictions: what fits, where memory goes and how fast, without a device. Reads `table/`, never the engine."""

__all__: list[str] = []
