"""How bytes move between ranks: one interface and its transports."""

__all__: list[str] = []
