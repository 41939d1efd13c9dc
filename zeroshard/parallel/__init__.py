"""Other axes of the mesh: thin adapters over torch's own."""

__all__: list[str] = []
