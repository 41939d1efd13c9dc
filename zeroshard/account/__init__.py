"""What a sharded model holds, will hold and sends, in bytes and in a table."""

__all__: list[str] = []
