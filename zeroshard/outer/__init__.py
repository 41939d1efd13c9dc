"""Data parallelism that does not wait: islands that train by themselves and exchange what they learned."""

__all__: list[str] = []
