"""Optimizers: against torch where they must be equal, alone and on slices."""
