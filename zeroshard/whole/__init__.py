"""A sharded model's values for code that needs them whole, compared, averaged or moved."""

__all__: list[str] = []
