"""The two error types of the package, and how text of others' files is shown.

Everything else raises `ValueError` or `TypeError` for arguments and `RuntimeError` for calls out of order.
"""

__all__ = ["CheckpointError", "RankMismatchError", "printable"]


class RankMismatchError(RuntimeError):
    """Ranks disagree: in model, options or versions, in what they do next, or because one of them does not come.

    It is raised on every rank that can still be reached, and its text holds what each rank did.

    ```python
    import zeroshard as zs

    assert issubclass(zs.RankMismatchError, RuntimeError)
    ```
    """


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged or does not belong to this model; the text names the file.

    ```python
    import zeroshard as zs

    assert issubclass(zs.CheckpointError, RuntimeError)
    ```
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str, keeps: str = "\n") -> str:
    r"""Return a text in which what steers a terminal or cannot be seen is written as an escape of Python's.

    Args:
        keeps: characters that stay as they are.

    ```python
    import zeroshard as zs

    assert zs.printable("name\x1b[2J") == r"name\x1b[2J"
    ```
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keeps else c.encode("unicode_escape").decode() for c in text)
