# SPDX-License-Identifier: Apache-2.0
"""Which submodules of a backbone become regions: by structure, never by class names.

A region is the largest piece that one artefact should serve. A module that has a structurally equal twin in what one
call runs is repeated: it is one region and its twins share the artefact. A module that holds a list of repeated
modules is taken apart; every other module below what was taken apart is a region of its own, so that together the
regions hold every weight outside the backbone's own forward. A backbone with no list of modules at all is one region.

A region that cannot be captured is split: submodules below it become regions, which act where it runs its own forward.
A single layer is none, for its artefact would gain nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from ..modules.tree import INTERNAL, PLAIN, Known, class_name, modules_in

# A repeated module that holds this many submodules is taken apart all the same: one graph of it would cost more to
# lower than its pieces win. The largest one measured to pay, SDXL's ten-block transformer, has about 250.
_LARGEST = 600


@dataclass(frozen=True)
class RegionSpec:
    """A submodule that becomes a region. `inner`: used only where the Sequential around it is not called itself."""

    path: str
    module: nn.Module
    inner: bool = False

    @property
    def kind(self) -> str:
        return type(self.module).__name__


def find_regions(root: nn.Module, *, whole: bool = True, split: Collection[str] = ()) -> list[RegionSpec]:
    """The regions of a backbone in the order of its module tree. Empty if it holds no weights.

    split: paths of regions that are split.

    whole: it may be one region; not where it is called through other methods than its forward. Then no call runs two
    parts of it, such as an encoder and a decoder, and a twin in another part is none.
    """
    keys: dict[int, object] = {}
    _structure_key(root, keys)
    counts = _counted(root, keys)
    if not _holds_weights(root):
        return []
    if whole and not any(_is_list(sub) and any(map(_is_block, sub.children())) for sub in root.modules()):
        return [RegionSpec("", root)]
    found: list[RegionSpec] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, inner: bool) -> None:
        nonlocal counts
        for name, child in module.named_children():
            if id(child) in seen or not _holds_weights(child):
                continue
            seen.add(id(child))
            at = f"{path}.{name}" if path else name
            if not whole and module is root:
                counts = _counted(child, keys)
            if _is_list(child) or (_holds_repeats(child, keys) and not _is_unit(child, counts[keys[id(child)]])):
                visit(child, at, inner)
                continue
            found.append(RegionSpec(at, child, inner))
            if type(child).forward is nn.Sequential.forward:  # its owner may walk over it instead of calling it
                visit(child, at, True)
            if at in split:
                below(child, at)

    def below(module: nn.Module, path: str) -> None:
        for part in parts(module, path):
            if id(part.module) not in seen:
                seen.add(id(part.module))
                found.append(part)
                if part.path in split:
                    below(part.module, part.path)

    visit(root, "", False)
    return found


def parts(module: nn.Module, path: str) -> Iterator[RegionSpec]:
    """The submodules that become regions where a region is split."""
    for name, child in module.named_children():
        at = f"{path}.{name}"
        if _is_list(child):
            yield from parts(child, at)
        elif _is_block(child):
            yield RegionSpec(at, child)


class Seats:
    """Where some submodules are, and all modules above them: to see whether one was exchanged."""

    def __init__(self, root: nn.Module, paths: Iterable[str]) -> None:
        seats: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        for path in filter(None, paths):
            module = root
            for name in path.split("."):
                seats[id(module), name] = (module._modules, name)
                module = module._modules[name]  # type: ignore[assignment]
        self._tables, self._names = [table for table, _ in seats.values()], [name for _, name in seats.values()]
        self._modules = list(map(dict.get, self._tables, self._names))

    def unchanged(self) -> bool:
        """Whether the same modules are there."""
        return all(map(is_, map(dict.get, self._tables, self._names), self._modules))


def beyond(root: nn.Module, besides: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Where modules with weights lie that only plain containers and objects hold, and their classes.

    besides: names of attributes that belong to the host.
    """
    inside = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    classes: dict[int, str | None] = {}  # by value: many modules may hold one
    known: Known = {}  # of what those hold
    for path, sub in root.named_modules():
        for name, value in list(sub.__dict__.items()):
            if name in INTERNAL or name in besides or name.startswith("_nexfort") or type(value) in PLAIN:
                continue
            if id(value) not in classes:
                classes[id(value)] = _class_beyond(value, inside, known)
            if (kind := classes[id(value)]) is not None:
                yield f"{path}.{name}" if path else name, kind


def _class_beyond(value: Any, inside: Collection[int], known: Known) -> str | None:
    """The class of a module that a value holds and that has other weights than those inside; None where none has."""
    for found in modules_in(value, known=known):
        if any(id(tensor) not in inside for tensor in (*found.parameters(), *found.buffers())):
            return type(found).__name__
    return None


def most_alike(module: nn.Module) -> int:
    """How many structurally equal blocks the list of a module holds that holds the most."""
    keys: dict[int, object] = {}
    _structure_key(module, keys)
    lists = (sub for sub in module.modules() if isinstance(sub, (nn.ModuleList, nn.ModuleDict, nn.Sequential)))
    each = (Counter(keys[id(child)] for child in one.children() if _is_block(child)) for one in lists)
    return max((count for counts in each for count in counts.values()), default=0)


def _counted(module: nn.Module, keys: dict[int, object]) -> Counter[object]:
    """How many modules of each structure there are in a module."""
    return Counter(keys[id(sub)] for sub in module.modules())


def _is_unit(module: nn.Module, count: int) -> bool:
    return count > 1 and sum(1 for _ in module.modules()) <= _LARGEST


def _is_list(module: nn.Module) -> bool:
    """A container that its owner walks over: it has no forward, or a Sequential whose forward is its owner's own."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is not nn.Sequential.forward
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def _is_block(module: nn.Module) -> bool:
    return bool(module._modules) and _holds_weights(module)


def _holds_repeats(module: nn.Module, keys: dict[int, object]) -> bool:
    for sub in module.modules():
        if isinstance(sub, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            blocks = [keys[id(child)] for child in sub.children() if _is_block(child)]
            if len(blocks) != len(set(blocks)):
                return True
    return False


def _holds_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _structure_key(module: nn.Module, keys: dict[int, object]) -> int:
    """Classes, shapes and dtypes of a module tree, hashed; fills `keys` for every submodule."""
    own = tuple((n, tuple(p.shape), p.dtype) for n, p in module._parameters.items() if p is not None)
    below = tuple((n, _structure_key(child, keys)) for n, child in module._modules.items() if child is not None)
    key = hash((class_name(type(module)), own, below))
    keys[id(module)] = key
    return key
