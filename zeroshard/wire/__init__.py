"""How bytes move between ranks: one interface, its transports, and what notices that a rank is gone."""

__all__: list[str] = []
