"""Full and counted state of a sharded model: `gathered()`, bytes by column."""

__all__: list[str] = []
