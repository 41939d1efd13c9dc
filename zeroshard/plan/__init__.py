"""Predictions: what fits and where memory goes, without a device. Read `tracer.py`, then `events.py`; `passes.py` has
what a step gathers and reduces.

Must not know the engine. The modules that only hold data or do arithmetic on it import without torch.
"""

__all__: list[str] = []
