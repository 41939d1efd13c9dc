"""The rules of the repository, read from the source. Each rule is shown to fail on a planted violation."""
