"""Other axes of the mesh: thin adapters of torch's implementations."""

__all__: list[str] = []
