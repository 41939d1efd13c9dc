"""How a model's state is taken over, read and written whole, and counted."""

__all__: list[str] = []
