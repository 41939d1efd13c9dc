"""The models that `zeroshard train` trains. Read `language.py`, then `gpt.py`."""

__all__: list[str] = []
