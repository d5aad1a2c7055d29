# SPDX-License-Identifier: Apache-2.0
"""What the code of a capture reached: from the code objects that ran to the addresses that an artefact depends on.

The walk begins at the methods of the block's classes and goes on from name to name, into each function that ran.
Python functions of torch that stand for operators are followed as well, whether they were seen to run or not. Torch's
machinery, Python's own library and this engine are not followed.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..guards.bytecode_names import ATTRIBUTE, CELL, GLOBAL, IMPORT, KEY, Chain, names_in
from ..guards.function_spec import FunctionCode
from ..guards.module_guards import METHOD
from ..guards.name_resolver import CLASS, Address, Resolver, Row, classes_in, function_in, is_container, text_of
from ..guards.option_recorder import Refused
from ..guards.value_digests import cell_contents, digest, is_library, plain_of_class
from ..modules.tree import PLAIN, fields_of
from ..system.torch_modes import CALL
from .source_hashes import is_host_code, module_of_code

# where torch's own operators in Python lie; what is below them is of torch's version
_TORCHS = ("torch.nn.", "torch.functional", "torch._tensor")
_MOST_FUNCTIONS = 4000
_WRAPPED = (ATTRIBUTE, "__wrapped__")
_TENSOR: Address = ("torch", ((CLASS, "Tensor"),))
_OF_CALLS = (*CALL, "__getattribute__")  # what a call of a module goes through, of which a class may get its own


def rows_of(
    module: nn.Module,
    codes: Iterable[types.CodeType],
    reads: Mapping[tuple[str, str], Any] | None = None,
    elsewhere: Callable[..., Any] | None = None,
    functions: Iterable[FunctionCode] = (),
    unread: Sequence[Any] = (),
) -> tuple[list[Row], str]:
    """The rows of a capture, and the first name whose value no other process can compare; "" if there is none.

    module: the block. codes: the code objects that ran. reads: the attributes of the block that they read
    (shadow_module.py); None for code that ran as it is, and was not captured. elsewhere: calls a function on the thread
    on which the code ran, where that is another one. functions: those that the block was called with. unread: values
    that names lead to and that nothing of the capture depends on.
    Raises Refused for code that counts in a global, and for what cannot be compared in each step.
    """
    of_capture, reads = reads is not None, reads or {}
    walk = _Walk(module, {code for code in codes if is_host_code(code)} - _code_of_finders(), unread)
    methods = [(type(module.get_submodule(path)), name) for (path, name), value in reads.items() if value is METHOD]
    walk.run(methods, [v for v in reads.values() if v is not METHOD], functions, of_capture=of_capture)
    if of_capture:
        walk.refuse_attributes_of_weights()
    resolver, only_here = Resolver(classes_in(module), deep=of_capture), ""
    rows: list[Row] = []
    for address in walk.addresses:
        if walk.is_own_cache(address):
            continue
        ends = resolver.ends(address)
        if walk.is_unread(ends[0]) or walk.is_assigned(address, ends[0]):
            continue
        text, whole = digest(ends, deep=of_capture)
        rows.append([address[0], [list(step) for step in address[1]], text])
        only_here = only_here or ("" if whole else text_of(rows[-1]))
    if of_capture and elsewhere is not None:
        locals_ = list({id(one): one for one in resolver.thread_locals}.values())
        if digest(locals_) != elsewhere(digest, locals_):
            raise Refused("its code reads a threading.local that has other values in the thread that captures it")
    return rows, only_here


def assigns_names(kind: type) -> bool:
    """Whether a class's forward, or a method of it that this names, assigns a global or changes what one leads to."""
    due, seen = ["forward"], set[str]()
    while due:
        name = due.pop()
        seen.add(name)
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        function = function_in(vars(owner).get(name)) if not is_library(owner) else None
        if function is None or not is_host_code(function.__code__):
            continue
        names = names_in(function.__code__)
        if names.stored or any(chain[0][0] == GLOBAL for chain in names.assigned):
            return True
        due += [one for one in function.__code__.co_names if one not in seen and hasattr(kind, one)]
    return False


def _code_of_finders() -> set[types.CodeType]:
    """Code that an import runs before the module is looked for: it finds modules, and is no code of the block's."""
    kinds = {finder if isinstance(finder, type) else type(finder) for finder in sys.meta_path}
    functions = [function_in(value) for kind in kinds for base in kind.__mro__ for value in vars(base).values()]
    return {function.__code__ for function in functions if function is not None}


class _Walk:
    """From function to function."""

    def __init__(self, module: nn.Module, ran: set[types.CodeType], unread: Sequence[Any] = ()) -> None:
        """unread: as for `rows_of`. What code wants of all modules that are loaded, it asks for by a string."""
        self._module, self._ran, self._unread = module, ran, (sys.modules, *unread)
        self.addresses: dict[Address, None] = {}
        self._resolver = Resolver(classes_in(module))
        self._due: list[tuple[Address | None, types.FunctionType]] = []
        self._seen: set[tuple[int, int]] = set()
        self._kinds: set[type] = set()
        self._visited: set[types.CodeType] = set()
        self._remembered: set[types.CodeType] = set()  # that need not have run: its results were remembered
        self._stored: set[tuple[str, str]] = set()
        self._read: set[tuple[str, str]] = set()
        self._changed: set[Address] = set()
        # in the code that ran: names of attributes, those that it sets, strings, and modules whose globals strings name
        self._used: set[str] = set()
        self._sets: set[str] = set()
        self._texts: set[str] = set()
        self._by_text: set[str] = set()
        self._asks_modules = False
        # of each class of modules the names of weights: a property of the class would be asked first
        self._held: dict[type, dict[str, None]] = {}
        for sub in module.modules():
            self._held.setdefault(type(sub), {}).update(dict.fromkeys((*sub._parameters, *sub._buffers)))
        self._open: dict[str, types.ModuleType] = {}  # modules that code has where their attributes cannot be followed

    def run(
        self,
        methods: Iterable[tuple[type, str]],
        objects: Iterable[Any],
        functions: Iterable[FunctionCode],
        *,
        of_capture: bool,
    ) -> None:
        """Find all addresses.

        methods: what code read of the class of a module that is no plain value. functions: as for `rows_of`, some of
        which may lie in no file. of_capture: what ran is the block's code alone. In a step the host's and libraries'
        code ran too, which keeps count of many things.
        """
        for kind in classes_in(self._module):
            self._class(kind)
        for kind, name in methods:
            self._reach((kind.__module__, ((CLASS, kind.__qualname__), (ATTRIBUTE, name))), is_called=False)
        for value in objects:
            self._met(None, value)
        self._follow()
        # code that nobody reached by name: an attribute's function, or one that was computed
        for code in sorted(self._ran - self._visited, key=lambda code: (code.co_filename, code.co_firstlineno)):
            if code not in self._visited and (found := module_of_code(code)) is not None:
                self._found(code, vars(found), of_capture)
        for one in functions:
            if one.code in self._ran:
                self._found(one.code, one.globals, of_capture)
        self._follow()
        known = -1
        while of_capture and known != len(self.addresses):
            known = len(self.addresses)
            self._by_use()
            self._follow()

    def _found(self, code: types.CodeType, in_module: dict[str, Any], of_capture: bool) -> None:
        """Code of a module ran that no name led to."""
        module = sys.modules.get(in_module["__name__"])
        if of_capture and module is not None and (owner := _class_of(code, module)) is not None:
            self._class(owner)
        self._function(None, types.FunctionType(code, in_module, closure=_empty_cells(code)))

    def _by_use(self) -> None:
        """What the code that ran has no written way to, but asks for by this name: attributes of modules that it passes
        on, of helpers' classes, methods of tensors, and what it finds by strings.
        """
        used = self._used | self._texts
        if not used.isdisjoint(("import_module", "__import__", "modules")):
            for text in sorted(self._texts):
                if text in sys.modules:
                    self._met(None, sys.modules[text])
                if self._asks_modules and text.replace(".", "").isidentifier():  # whether it is loaded
                    self.addresses["", ((IMPORT, text),)] = None
        if not used.isdisjoint(("environ", "getenv")):
            for text in sorted(filter(str.isidentifier, self._texts)):
                self._reach(("", ((IMPORT, "os"), (ATTRIBUTE, "environ"), (KEY, text))), is_called=True)
        for at in sorted(self._by_text):
            for text in sorted(self._texts.intersection(vars(sys.modules[at]))):
                self._reach((at, ((GLOBAL, text),)), is_called=True)
        for module in list(self._open.values()):
            for name in sorted(used.intersection(vars(module))):
                self._reach(("", ((IMPORT, module.__name__), (ATTRIBUTE, name))), is_called=True)
        for kind in filter(self._resolver.leads_to, list(self._kinds)):
            held: dict[str, Any] = {}
            for base in kind.__mro__:
                held |= {} if is_library(base) else dict(vars(base))
            for name in sorted(used.intersection(held) - self._sets):  # what it counts in is its own
                if function_in(held[name]) is None:  # the functions that ran are known
                    self._reach((kind.__module__, ((CLASS, kind.__qualname__), (ATTRIBUTE, name))), is_called=True)
        for name in sorted(self._used.intersection(dir(torch.Tensor))):
            if not name.startswith("__"):
                self.addresses[_TENSOR[0], (*_TENSOR[1], (ATTRIBUTE, name))] = None

    def refuse_attributes_of_weights(self) -> None:
        """Raise Refused where code asks for an attribute that somebody put on a weight: what stands for it has none."""
        for path, weight in (*self._module.named_parameters(), *self._module.named_buffers()):
            if type(weight) not in (torch.Tensor, nn.Parameter):
                continue  # its attributes are part of what it is described by (subclass_unwrap.py)
            for name in (fields_of(weight) or {}).keys() & (self._used | self._texts):
                raise Refused(f"its code reads an attribute {name}, which the weight {path} has")

    def is_unread(self, value: Any) -> bool:
        """Whether nothing depends on what a value holds."""
        return any(value is one for one in self._unread)

    def is_own_cache(self, address: Address) -> bool:
        """Whether an address leads to, or through, a container that the code itself changes."""
        module, chain = address
        prefixes = ((module, chain[:length]) for length in range(1, len(chain) + 1))
        # `torch.add` looks like a set's method
        return any(prefix in self._changed and is_container(self._resolver.ends(prefix)[0]) for prefix in prefixes)

    def is_assigned(self, address: Address, value: Any) -> bool:
        """Whether the code itself assigns a global: it does so again. Raises Refused where it counts in it."""
        module, chain = address
        place = (module, chain[0][1])
        if chain[0][0] != GLOBAL or place not in self._stored:
            return False
        if len(chain) == 1 and type(value) is int and place in self._read:
            raise Refused(f"it counts in {module}.{chain[0][1]}, and compiled code would not")
        return True

    def _follow(self) -> None:
        while self._due:
            if len(self._seen) > _MOST_FUNCTIONS:
                raise Refused(f"its code reaches more than {_MOST_FUNCTIONS} functions")
            self._function(*self._due.pop(0))

    def _function(self, address: Address | None, function: types.FunctionType) -> None:
        key = (id(function.__code__), id(function.__globals__))
        if key in self._seen:
            return
        self._seen.add(key)
        self._visited.update(_nested(function.__code__))
        self._resolver.met(function)
        names, module = names_in(function.__code__), str(function.__globals__.get("__name__"))
        self._stored |= {(module, name) for name in names.stored}
        self._changed |= {(module, chain) for chain in names.changed if chain[0][0] == GLOBAL}
        if not self._ran.isdisjoint(_nested(function.__code__)):
            self._used |= names.attributes
            self._sets |= names.sets
            self._texts |= names.texts
            if "globals" in names.attributes and module in sys.modules:
                self._by_text.add(module)
        for value in (*(function.__defaults__ or ()), *map(cell_contents, function.__closure__ or ())):
            if isinstance(value, types.ModuleType):
                self._met(None, value)
        for chain in names.chains:
            found = _address_of(chain, address, module, function)
            if found is not None and found not in self.addresses:
                self._read.add((module, chain[0][1]))
                if function.__code__ in self._remembered:
                    inner = map(function_in, self._resolver.ends(found))
                    self._remembered |= {
                        one.__code__ for one in inner if one is not None and is_host_code(one.__code__)
                    }
                self._reach(found, is_called=chain in names.called)
                if chain in names.whole:
                    for value in self._resolver.ends(found):
                        if isinstance(value, types.ModuleType):
                            self._met(None, value)

    def _reach(self, address: Address, *, is_called: bool) -> None:
        if address in self.addresses:
            return
        ends = self._resolver.ends(address)
        if is_called and all(map(self._stood_by, ends)):
            return  # a function that is called in another case than the captured one
        self.addresses[address] = None
        for value in ends:
            self._met(address, value)
        for length in range(1, len(address[1])):  # methods of what lies on the way may read more of it
            for value in self._resolver.ends((address[0], address[1][:length])):
                if not isinstance(value, (types.ModuleType, types.FunctionType)):
                    self._met(None, value, 0)

    def _stood_by(self, value: Any) -> bool:
        """Whether a value is a function of the host that did not run."""
        function = function_in(value)
        return function is not None and is_host_code(function.__code__) and not self._has_run(function)

    def _has_run(self, function: types.FunctionType) -> bool:
        """Whether it ran, or what it gave was remembered by what called it."""
        return function.__code__ in self._ran or function.__code__ in self._remembered

    def _met(self, address: Address | None, value: Any, depth: int = 2) -> None:
        """A value was reached: go on with the code that it brings."""
        if self.is_unread(value):
            self._asks_modules |= value is sys.modules
            return
        function = function_in(value)
        if function is not None:
            if self._is_followed(function):
                self._due.append((address if function is value else None, function))
        elif isinstance(value, str):
            self._texts.add(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if address is None and sys.modules.get(value.__name__) is value:
                self._open.setdefault(value.__name__, value)
        elif isinstance(value, functools.partial):
            self._met(None, value.func, depth)
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            if depth:
                for key, item in list(value.items()) if isinstance(value, dict) else enumerate(tuple(value)):
                    step = (KEY, key) if type(key) in (str, int) and not isinstance(value, (set, frozenset)) else None
                    at = (address[0], (*address[1], step)) if address is not None and step is not None else None
                    self._met(at if not isinstance(item, types.ModuleType) else None, item, depth - 1)
        elif "__wrapped__" in (fields := fields_of(value) or {}) and callable(value):
            inner = function_in(fields["__wrapped__"])
            if inner is not None and is_host_code(inner.__code__):  # its results may be remembered: it need not run
                inner_at = (address[0], (*address[1], _WRAPPED)) if address is not None else None
                self._remembered.add(inner.__code__)
                self._due.append((inner_at, inner))
        elif not isinstance(value, (*PLAIN, nn.Module)) and not is_library(type(value)):
            self._class(type(value))

    def _is_followed(self, function: types.FunctionType) -> bool:
        if self._has_run(function):
            return True
        return f"{function.__globals__.get('__name__')}.".startswith(_TORCHS)

    def _class(self, kind: type) -> None:
        """The methods of a class that ran, where the class itself and where those that it inherits from have them."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        is_module = issubclass(kind, nn.Module)
        if self._resolver.leads_to(kind):
            for name in (*_OF_CALLS, *self._held.get(kind, ())) if is_module else plain_of_class(kind):
                self.addresses[kind.__module__, ((CLASS, kind.__qualname__), (ATTRIBUTE, name))] = None
        for base in kind.__mro__[:-1]:
            library = is_library(base)
            for name, value in list(vars(base).items()):
                function = function_in(value)
                if library:
                    wanted = is_module and base is not nn.Module and _is_asked_of_layers(name, function)
                else:
                    wanted = function is not None and function.__code__ in self._ran
                if wanted:
                    for owner in dict.fromkeys((kind, base)):
                        at = (owner.__module__, ((CLASS, owner.__qualname__), (ATTRIBUTE, name)))
                        if self._resolver.leads_to(owner) and at not in self.addresses:
                            self.addresses[at] = None
                    if function is not None:
                        self._due.append((None, function))


def _is_asked_of_layers(name: str, function: types.FunctionType | None) -> bool:
    """Whether a function in the table of a torch layer's class is its forward, or one that syntax asks for: a loop over
    an nn.Sequential. What all modules have, such as `__init__`, computes nothing.
    """
    is_special = function is not None and name[:2] == "__" and not hasattr(nn.Module, name)
    return name == "forward" or is_special


def _address_of(chain: Chain, own: Address | None, module: str, function: types.FunctionType) -> Address | None:
    """The address of a chain that a function's code follows. own: of the function itself."""
    kind, name = chain[0]
    if kind == IMPORT:
        if name.startswith("."):
            package = function.__globals__.get("__package__") or ""
            try:
                name = importlib.util.resolve_name(name, package)
            except ImportError:
                return None
        return "", ((IMPORT, name), *chain[1:])
    if kind == CELL:
        return (own[0], (*own[1], *chain)) if own is not None else None
    return module, chain


@functools.lru_cache(maxsize=8192)
def _nested(code: types.CodeType) -> frozenset[types.CodeType]:
    """A code object and those of the functions that are defined in it."""
    inner = [_nested(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset((code,)).union(*inner)


def _class_of(code: types.CodeType, module: types.ModuleType) -> type | None:
    """The class of a module that has a method with this code."""
    due = [value for value in list(vars(module).values()) if isinstance(value, type)]
    while due:
        kind = due.pop()
        if kind.__module__ == module.__name__:
            for value in list(vars(kind).values()):
                if isinstance(value, type):
                    due.append(value)
                elif (function := function_in(value)) is not None and function.__code__ is code:
                    return kind
    return None


def _empty_cells(code: types.CodeType) -> tuple[types.CellType, ...]:
    return tuple(types.CellType() for _ in code.co_freevars)
