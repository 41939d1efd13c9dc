"""The evidence for plans: the ZeRO paper's tables and published runs, played by `plan/`."""

__all__: list[str] = []
