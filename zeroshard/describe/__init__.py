"""A model described: its units, the formats of each column, and the records that engine and planner share.

Read `units.py`, then `specs.py`. It reads models and changes nothing, and knows neither ranks' processes nor engines.
"""

__all__: list[str] = []
