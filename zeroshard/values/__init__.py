"""The first values of a model's parameters: drawn unit by unit, or read from files."""

__all__: list[str] = []
