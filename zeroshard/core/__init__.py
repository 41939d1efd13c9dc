"""The engine: ZeRO stages 0 to 3. Start with `zero.py`, then `engine.py`, `order.py`, `unit.py`, `buffer.py`."""

__all__: list[str] = []
