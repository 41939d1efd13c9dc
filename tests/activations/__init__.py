"""Tests of the engine: zero stages 0 to 3 against oracles that do not shard."""
