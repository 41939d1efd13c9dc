"""State dicts of `torch.save`: a file, or the files `pytorch_model-00001-of-00002.bin` of a folder with their index.

Owns that layout, which older models of the Hugging Face Hub and DeepSpeed's `zero_to_fp32.py` have. Read `pickled.py`
first.
"""

import zlib
from pathlib import Path
from typing import final

import torch

from zeroshard.checkpoint.folders import BIN, check_index, files_of
from zeroshard.checkpoint.pickled import read_tensors
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import Source
from zeroshard.checkpoint.values import dtype_name, fill_from
from zeroshard.table.errors import CheckpointError

__all__ = ["BinFolder"]


@final
class BinFolder(Source):
    """The tensors of such a file or folder.

    Raises:
        CheckpointError: the index is invalid, or a file holds anything but tensors under names.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        self._tensors: dict[str, torch.Tensor] = {}
        specs: dict[str, Spec] = {}
        homes: dict[str, str] = {}
        for file in files_of(folder, BIN):
            for name, tensor in read_tensors(file).items():
                if name in specs:
                    raise CheckpointError(f"{file}: '{name}' is also in another file of this folder.")
                specs[name] = Spec("model", name, dtype_name(tensor.dtype, f"{file}: '{name}'"), (*tensor.shape,))
                self._tensors[name], homes[name] = tensor, file.name
        check_index(folder, BIN, homes)
        super().__init__(folder, specs, None, zlib.crc32(repr(sorted(specs.items())).encode()))

    def fill(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements of a tensor; see `Source`."""
        fill_from(self._tensors[name], start, buffer)
