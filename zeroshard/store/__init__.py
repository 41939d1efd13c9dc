"""Tensors in a file of this rank alone."""
