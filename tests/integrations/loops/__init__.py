"""Training loops of the shape of well-known ones, which `docs/coming-from.md` converts by the diffs that it shows."""
