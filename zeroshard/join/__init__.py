"""How ranks of a launch find each other: `zs.init()`, waits at the start, and the device of each rank."""

__all__: list[str] = []
