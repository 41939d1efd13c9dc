"""Defects that users of other libraries reported, each tried here in its own shape."""
