"""Local updates: islands of ranks that step by themselves, and exchange what they learned.

Read `formula.py` (the arithmetic), then `islands.py` (when an exchange begins and ends).
"""

__all__: list[str] = []
