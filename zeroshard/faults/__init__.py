"""What a rank tells the others when something goes wrong. Read `watchdog.py`."""

__all__: list[str] = []
