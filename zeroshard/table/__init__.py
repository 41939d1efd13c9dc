"""What lives where and when, in names and integers: no torch, and nothing else of the package."""

__all__: list[str] = []
