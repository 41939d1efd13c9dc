"""How `zs.shard` turns a model, an optimizer and arguments into an engine with its hooks."""

__all__: list[str] = []
