"""The version of the package; the build reads it here."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
