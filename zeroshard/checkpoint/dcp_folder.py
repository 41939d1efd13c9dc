"""A folder of torch.distributed.checkpoint, as FSDP2, torchtitan, Accelerate and Lightning write it.

Owns the reading, through torch's own planner and storage reader, of one tensor at a time. Which entries are what
`dcp_layout.py` knows. Read `pickled.py` first. The other direction is `dcp.py`.
"""

import io
import warnings
import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from zeroshard.checkpoint import files
from zeroshard.checkpoint.dcp_layout import METADATA, NAMES, Entry, Layout, OptimizerKeys, layout_of
from zeroshard.checkpoint.manifest import join_state
from zeroshard.checkpoint.pickled import read_dcp_metadata, read_value
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import Source, opened
from zeroshard.checkpoint.values import dtype_name, fill_from
from zeroshard.table.errors import CheckpointError

__all__ = ["DcpFolder"]

PAIRS: Final = 1 << 22
"""Pairs of a tensor's parts that are compared at a time."""

Tensor = torch.Tensor


@final
class DcpFolder(Source):
    """The model of such a folder, and the states of its optimizers.

    Args:
        model: the keys that lead to the model's state dict, joined by dots; None finds it.
        model_only: leave optimizers out.
        optimizer: the class of the optimizers; None tells Adam, AdamW and SGD by their options.

    Raises:
        CheckpointError: files are missing or damaged, or would run code, or it holds no model.
    """

    def __init__(
        self, path: str | Path, *, model: str | None = None, model_only: bool = False, optimizer: str | None = None
    ) -> None:
        folder = Path(path)
        files.refuse_link(folder)
        self._reader = _Reader(folder, read_dcp_metadata(folder / METADATA))
        self._class = optimizer
        self._held: tuple[str, Tensor] | None = None
        self.layout: Layout = layout_of(self._reader.entries(), str(folder), model=model, model_only=model_only)
        self._keys = dict(self.layout.model)
        specs = {name: self._describe_tensor("model", name, key) for name, key in self._keys.items()}
        super().__init__(folder, specs, None, zlib.crc32(repr(sorted(specs.items())).encode()))
        self.states = {spec.name: spec for spec in self._states()}

    def _describe_tensor(self, kind: str, name: str, key: str) -> Spec:
        described = self._reader.tensor(key)
        dtype = dtype_name(described.properties.dtype, f"{self._reader.folder}: '{key}'")
        return Spec(kind, name, dtype, (*described.size,))

    def _states(self) -> Iterable[Spec]:
        """Yield the states with a value for each element, whose names begin with the optimizer's number."""
        for number, one in enumerate(self.layout.optimizers):
            for name, keys in one.states.items():
                for key, flat in keys.items():
                    if self._is_of_elements(name, key, flat):
                        full = join_state(number, key, name)
                        self._keys[full] = flat
                        yield self._describe_tensor("state", full, flat)

    def _is_of_elements(self, name: str, key: str, flat: str) -> bool:
        described = self._reader.metadata.state_dict_metadata[flat]
        if key == "step" or isinstance(described, BytesStorageMetadata):
            return False
        if described.size == torch.Size(self.specs[name].shape):
            return True
        if described.size.numel() > 1:
            raise CheckpointError(
                f"{self.path}: '{flat}' has shape {(*described.size,)} for a parameter of shape "
                f"{self.specs[name].shape}. States of another shape than their parameter's cannot be imported: import "
                "the model alone (--model-only)."
            )
        return False

    def fill(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements of a tensor; see `Source`. The whole tensor is in memory then."""
        if self._held is None or self._held[0] != name:
            self._held = None  # one at a time
            self._held = name, self._reader.load([self._keys[name]])[self._keys[name]]
        fill_from(self._held[1], start, buffer)

    @cached_property
    def optimizers(self) -> list[dict[str, Any]]:
        """Classes, groups, hyper-parameters and counters, as `inventory.groups_of` describes them."""
        return [self._describe(number, one) for number, one in enumerate(self.layout.optimizers)]

    def _describe(self, number: int, one: OptimizerKeys) -> dict[str, Any]:
        small = {
            (name, key): flat
            for name, keys in one.states.items()
            for key, flat in keys.items()
            if join_state(number, key, name) not in self.states
        }
        values = self._reader.load([*small.values(), *one.groups.values()])
        states: dict[str, dict[str, Any]] = {name: {} for name in one.states}
        for (name, key), flat in small.items():
            states[name][key] = values[flat]
        options = {way: values[flat] for way, flat in one.groups.items()}
        groups = _groups_by_name(options) if one.is_flat else _groups_in_lists(options, self.path)
        steps = [int(state["step"]) for state in states.values() if "step" in state]
        cls = self._class or _class_of(groups, self.path)
        return {"class": cls, "groups": groups, "states": states, "steps": max(steps, default=0)}


def _groups_by_name(options: Mapping[tuple[Any, ...], Any]) -> list[dict[str, Any]]:
    """Return the groups of parameters with the same options."""
    by_name: dict[str, dict[str, Any]] = {}
    for (name, key), value in options.items():
        by_name.setdefault(name, {})[key] = value
    groups: list[dict[str, Any]] = []
    for name, own in by_name.items():
        group = next((one for one in groups if repr(one["options"]) == repr(own)), None)
        if group is None:
            groups.append(group := {"options": own, "params": []})
        group["params"].append(name)
    return groups


def _groups_in_lists(options: Mapping[tuple[Any, ...], Any], path: Path) -> list[dict[str, Any]]:
    """Return the groups of a list of them, of which torch may have saved each value by itself."""
    found: list[dict[str, Any]] = list(options[()]) if () in options else []
    for way, value in options.items():
        if len(way) == 2 and type(way[0]) is int and 0 <= way[0] <= len(options):
            found += [{} for _ in range(way[0] + 1 - len(found))]
            found[way[0]][way[1]] = value
    for group in found:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{path}: groups of parameters do not list names. {NAMES}")
    return [
        {"options": {key: value for key, value in group.items() if key != "params"}, "params": group["params"]}
        for group in found
    ]


def _class_of(groups: list[dict[str, Any]], path: Path) -> str:
    """Return the class that writes such groups; such folders do not name it."""
    keys = groups[0]["options"].keys() if groups else {}.keys()
    if {"decoupled_weight_decay", "amsgrad"} <= keys:  # NAdam and RAdam have the first one, too
        return "AdamW" if groups[0]["options"]["decoupled_weight_decay"] else "Adam"
    if {"momentum", "dampening", "nesterov"} <= keys:
        return "SGD"
    raise CheckpointError(f"{path}: does not say of which class its optimizer is. Give it with --optimizer.")


class _Reader(FileSystemReader):
    """torch's reader, with metadata that was read safely, for a folder whose parts are all there."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.folder, self.metadata = folder, metadata
        self._covered = set[str]()
        """Tensors whose parts were compared: each is described, and read later."""
        self._check_files()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def entries(self) -> list[Entry]:
        """Return the entries with the way to each."""
        ways = self.metadata.planner_data if isinstance(self.metadata.planner_data, dict) else {}
        found = []
        for key, described in self.metadata.state_dict_metadata.items():
            way = ways.get(key, (key,))
            if not isinstance(way, tuple) or not way or not all(type(one) in (int, str) for one in way):
                raise CheckpointError(f"{self.folder / METADATA}: {key!a:.80} has no way of names and numbers.")
            numel = described.size.numel() if isinstance(described, TensorStorageMetadata) else None
            found.append(Entry(key, way, numel))
        return found

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Return a tensor's description, once its parts are known to cover it."""
        described = self.metadata.state_dict_metadata[key]
        if not isinstance(described, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder}: '{key}' is no tensor.")
        if key not in self._covered:
            _check_cover(described, f"{self.folder}: '{key}'")
            self._covered.add(key)
        return described

    def load(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of entries."""
        known = self.metadata.state_dict_metadata
        wanted: dict[str, Any] = {}
        for key in keys:
            wanted[key] = None
            if not isinstance(known[key], BytesStorageMetadata):
                described = self.tensor(key)
                wanted[key] = torch.empty(described.size, dtype=described.properties.dtype, device="cpu")
        try:
            with warnings.catch_warnings():
                # torch warns of what no_dist=True says.
                warnings.filterwarnings("ignore", message="torch.distributed is")
                dcp.load(wanted, storage_reader=self, planner=_Planner(), no_dist=True)
        except (Exception, CheckpointException) as error:
            # torch's own is no Exception, and has the ranks' causes in it.
            causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
            text = (str(causes[0] if causes else error).splitlines() or [""])[0]
            raise CheckpointError(
                f"{self.folder}: {', '.join(map(repr, list(wanted)[:2]))} cannot be read ({text[:200]})."
            ) from error
        return wanted

    def _check_files(self) -> None:
        """Raise unless every part lies in a regular file of this folder."""
        sizes: dict[str, int] = {}
        stored = self.metadata.storage_data
        if not isinstance(stored, dict) or not isinstance(self.metadata.state_dict_metadata, dict):
            raise CheckpointError(f"{self.folder / METADATA}: lists no files.")
        for index, info in stored.items():
            name, start, nbytes = (getattr(info, key, None) for key in ("relative_path", "offset", "length"))
            numbers = [number for number in (start, nbytes) if type(number) is int and number >= 0]
            if len(numbers) != 2 or not isinstance(name, str):
                raise CheckpointError(f"{self.folder / METADATA}: '{index.fqn}' lies nowhere.")
            if name not in sizes:
                if "/" in name or "\\" in name or name.startswith("."):
                    raise CheckpointError(f"{self.folder / METADATA}: {name[:200]!r} is not a file of this folder.")
                files.refuse_link(self.folder / name)
                with opened(self.folder / name) as descriptor:
                    sizes[name] = files.size_of(descriptor)
            if sum(numbers) > sizes[name]:
                raise CheckpointError(
                    f"{self.folder / name}: has {sizes[name]} bytes; '{index.fqn}' ends at byte {sum(numbers)}."
                )


class _Planner(DefaultLoadPlanner):
    """torch's planner for entries by their flat keys, whose pickles hold numbers, texts and tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.state_dict[key] = read_value(value, f"'{key}'")


def _check_cover(described: TensorStorageMetadata, where: str) -> None:
    """Raise unless each element of a tensor is in exactly one of its parts."""
    size, parts = described.size, described.chunks
    starts = np.array([tuple(part.offsets) for part in parts], dtype=np.int64).reshape(len(parts), len(size))
    stops = starts + np.array([tuple(part.sizes) for part in parts], dtype=np.int64).reshape(starts.shape)
    is_inside = bool((starts >= 0).all() and (stops <= np.array(size, dtype=np.int64)).all())
    numel = sum(part.sizes.numel() for part in parts)
    rows = max(1, PAIRS // max(1, len(parts)))
    pairs = 0
    for first in range(0, len(parts), rows):
        low = np.maximum(starts[first : first + rows, None], starts[None])
        high = np.minimum(stops[first : first + rows, None], stops[None])
        pairs += int((high > low).all(axis=2).sum())
    own = sum(part.sizes.numel() > 0 for part in parts)
    if not is_inside or numel != size.numel() or pairs != own:
        raise CheckpointError(f"{where}: its {len(parts)} parts do not have each of its {size.numel()} elements once.")
