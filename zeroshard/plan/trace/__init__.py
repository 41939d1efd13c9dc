"""Traces of modules on tensors without memory."""

__all__: list[str] = []
