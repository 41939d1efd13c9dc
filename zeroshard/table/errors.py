"""The two error types of the package, and the escaping of untrusted text.

All other errors are `ValueError` or `TypeError` for arguments and `RuntimeError` for calls out of order.
"""

__all__ = ["CheckpointError", "RankMismatchError", "printable"]


class RankMismatchError(RuntimeError):
    """Ranks differ in model, options or versions, or in their next operation, or a rank does not respond.

    The error is raised on every rank that can be reached; the text lists the operation of each rank.

    ```python
    import zeroshard as zs

    assert issubclass(zs.RankMismatchError, RuntimeError)
    ```
    """

    is_consequence = False
    """Whether another rank failed first, and tells the cause."""

    @classmethod
    def of_another(cls, text: str) -> "RankMismatchError":
        """Return the error of a rank that ends because another one failed."""
        error = cls(text)
        error.is_consequence = True
        return error


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged or of another model; the text names the file.

    ```python
    import zeroshard as zs

    assert issubclass(zs.CheckpointError, RuntimeError)
    ```
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str, keeps: str = "\n") -> str:
    r"""Return a text with control and invisible characters replaced by Python escapes.

    Args:
        text: any text, such as a name from a file.
        keeps: characters that are not replaced.

    ```python
    from zeroshard.table.errors import printable

    assert printable("name\x1b[2J") == r"name\x1b[2J"
    ```
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keeps else c.encode("unicode_escape").decode() for c in text)
