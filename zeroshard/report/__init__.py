"""What a run did: where the time of its steps went. Read `profile.py`."""

__all__: list[str] = []
