"""The engine: ZeRO stages 0 to 3. Start with `engine.py`, then `order.py`, `unit.py`, `buffer.py`."""

__all__: list[str] = []
