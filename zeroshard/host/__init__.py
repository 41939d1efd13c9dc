"""What the ranks of one host share."""

__all__: list[str] = []
