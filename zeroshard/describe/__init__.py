"""A model as engine and planner see it before anything is built: units, formats, names. Read `activations.py` first."""

__all__: list[str] = []
