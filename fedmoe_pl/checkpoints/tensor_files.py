"""The files of a run's models and of its servers' states, in which each tensor is written once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmoe_pl.checkpoints.writing import DamagedFileError, needed, plain, read_tensors, replacing, write_tensors
from fedmoe_pl.trees import Tree

_COMPARED = 16  # elements that tell most tensors apart
_TOLERATED = 2**16  # bytes of a file that are not worth writing its other ones again


class Place(NamedTuple):
    """Where a tensor is: the number of the file, and its name in it."""

    file: int
    name: str


class TensorFiles:
    """Tensors in numbered files; a checkpoint refers to the files of earlier ones for what did not change.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Any, list[tuple[Tensor, Place]]] = defaultdict(list)
        self._read: dict[int, Tree] = {}

    def write(self, content: Any, staying: Collection[int]) -> tuple[Any, set[int]]:
        """The content with places for tensors, and their files; what none of these has is written to a new one.

        If less than half of a file would be used, that is written again, unless the file is one of those that stay.
        """
        self._read.clear()
        named: dict[str, Tensor] = {}
        replaced(content, named.__setitem__)
        places = {key: place for key, tensor in named.items() if (place := self._place(tensor)) is not None}
        used = Counter[int]()
        for place, key in {place: key for key, place in places.items()}.items():
            used[place.file] += named[key].nbytes
        wasted = {file for file, size in used.items() if file not in staying and self._is_wasted(file, size)}
        self._forget(lambda place: place.file in wasted)
        number, new = max(map(int, (path.stem for path in self._paths())), default=0) + 1, Tree()
        for key, tensor in named.items():
            if key in places and places[key].file not in wasted:
                continue
            place = self._place(tensor)
            if place is None:
                place, new[key] = Place(number, key), plain(tensor)
                self._known[_alike(tensor)].append((tensor, place))
            places[key] = place
        if new:
            with replacing(self._path(number)) as temporary:
                write_tensors(temporary, new, number=number)
        return replaced(content, lambda key, _: places[key]._asdict()), {place.file for place in places.values()}

    def keep(self, used: Collection[int], others: Collection[int]) -> None:
        """Removes all files but the used ones, to which new checkpoints may refer, and these others."""
        self._forget(lambda place: place.file not in used)
        for path in self._paths():
            if int(path.stem) not in {*used, *others}:
                path.unlink()

    def read(self, item: dict[str, Any]) -> Any:
        """The tensor in a place, as ``json.loads`` meets it; other values stay."""
        if item.keys() != {*Place._fields} or not isinstance(item["file"], int):
            return item
        place = Place(**item)
        if place.file not in self._read:
            self._read[place.file] = self._read_file(place.file)
        tensor = self._read[place.file][place.name]
        if self._place(tensor) is None:
            self._known[_alike(tensor)].append((tensor, place))
        return tensor

    def _read_file(self, number: int) -> Tree:
        try:
            return read_tensors(self._path(number), number=number)
        except DamagedFileError as error:
            raise needed(self._path(number)) from error

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.glob("*.safetensors") if path.stem.isdigit()]

    def _is_wasted(self, number: int, used: int) -> bool:
        return self._path(number).stat().st_size > 2 * used + _TOLERATED

    def _place(self, tensor: Tensor) -> Place | None:
        same = (place for other, place in self._known[_alike(tensor)] if same_bits(other, tensor))
        return next(same, None)

    def _forget(self, is_gone: Callable[[Place], bool]) -> None:
        for alike, known in [*self._known.items()]:
            self._known[alike] = [(tensor, place) for tensor, place in known if not is_gone(place)]


def replaced(content: Any, change: Callable[[str, Tensor], Any], key: str = "") -> Any:
    """The content with something else in place of each tensor, which has a key such as ``models/initial/bias``."""
    if isinstance(content, Tensor):
        return change(key, content)
    if isinstance(content, dict):
        return {name: replaced(item, change, f"{key}/{name}" if key else name) for name, item in content.items()}
    if isinstance(content, list | tuple):
        return [replaced(item, change, f"{key}/{index}") for index, item in enumerate(content)]
    return content


def _alike(tensor: Tensor) -> tuple[object, ...]:
    """What tensors of the same bits have in common."""
    return tensor.dtype, tensor.shape, _bits(tensor.detach().reshape(-1)[:_COMPARED]).numpy().tobytes()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same in every bit: nan is itself, and 0 is not -0."""
    return one is other or (
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
