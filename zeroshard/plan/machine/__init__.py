"""Machines in numbers: devices, networks, profiles, and torch's caching allocator."""

__all__: list[str] = []
