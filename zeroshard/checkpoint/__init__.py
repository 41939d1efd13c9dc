"""Checkpoints: written by any number of ranks, read by any other, verified before they change anything.

Read `manifest.py` for the format, `save.py` and `load.py` for what ranks do with it. What reads files alone (`files`,
`strict`, `manifest`, `reader`, `verify`, `exchange`) must not know torch; `inventory` is where tensors begin.
"""

__all__: list[str] = []
