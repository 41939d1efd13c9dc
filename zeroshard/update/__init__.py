"""How an optimizer's step is made on shards: at once, in pieces, in the background, from files, or by owners."""

__all__: list[str] = []
