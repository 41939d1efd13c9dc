"""One step played in integers and seconds."""

__all__: list[str] = []
