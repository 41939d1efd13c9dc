"""Data parallelism that does not wait: islands of ranks that step by themselves, and exchange what they learned.

Read `formula.py` (the arithmetic), then `islands.py` (when islands of one launch exchange), then `serve.py` and
`island_exchange.py` (islands that are launches of their own).
"""

__all__: list[str] = []
