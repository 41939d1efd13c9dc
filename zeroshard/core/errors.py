"""The two error types of the package, and how an error says where it happened.

Everything else raises `ValueError` or `TypeError` for arguments and `RuntimeError` for calls out of order.
"""

__all__ = ["CheckpointError", "RankMismatchError"]


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
