# SPDX-License-Identifier: Apache-2.0
"""The names that a function's code reaches, read from its bytecode: globals, closure cells, imports, and their parts.

A *chain* says how code gets at a value: `F.scaled_dot_product_attention` is the global `F` and an attribute of it,
`CONFIG["scale"]` the global `CONFIG` and a key. Chains are found for what is written out in the code. What code
computes (`getattr(module, name)`, a key in a variable) ends a chain at the last value that is written out.

Nothing is executed here, and no value is looked at.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GLOBAL, CELL, IMPORT, ATTRIBUTE, KEY = "global", "cell", "import", "attr", "key"
Step = tuple[str, Any]  # one of the kinds above, and a name, a key, or a module with a dot for each package to go up
Chain = tuple[Step, ...]

# methods of lists, dicts, sets and deques that change them
CHANGING = frozenset(
    "add append appendleft clear discard extend extendleft insert move_to_end pop popitem popleft remove reverse "
    "rotate setdefault sort update".split()
)
TAKING = frozenset("clear discard pop popitem popleft remove".split())  # of those, what takes something out
_NOISE = frozenset(
    "CACHE NOP PUSH_NULL PRECALL EXTENDED_ARG RESUME COPY_FREE_VARS MAKE_CELL NOT_TAKEN TO_BOOL KW_NAMES".split()
)
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL")
_LOCAL_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")
# two instructions in one, as Python 3.13 and newer write them
_TWO_IN_ONE = re.compile(r"(LOAD|STORE)_FAST(?:_BORROW)?_(LOAD|STORE)_FAST(?:_BORROW)?")
_EXCHANGES = ("SWAP", "ROT_")  # of what lies on top of the stack
_KEYS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Names:
    """What a function's code reaches, functions defined inside it included.

    chains: in the order of the code. called: those that it does nothing with but call what is there. whole: those whose
    value goes where its attributes cannot be followed. stored: globals that it assigns. rebound: free variables that it
    assigns. changed: chains of containers that it changes. taken: those that it takes something out of. assigned: those
    of which it assigns items or attributes. counted: those of which it changes items or attributes in their place
    (`+=`). unclear: those of which it may do so, where it jumps on the way. attributes: the names of all attributes
    that it asks anything for. sets: those that it sets, or that hold what it changes. texts: the strings in it.
    """

    chains: tuple[Chain, ...]
    called: frozenset[Chain]
    whole: frozenset[Chain]
    stored: frozenset[str]
    rebound: frozenset[str]
    changed: frozenset[Chain]
    taken: frozenset[Chain]
    assigned: frozenset[Chain]
    counted: frozenset[Chain]
    unclear: frozenset[Chain]
    attributes: frozenset[str]
    sets: frozenset[str]
    texts: frozenset[str]


@dataclass
class _Op:
    name: str
    value: Any
    effect: int  # on the height of the stack
    calls: bool = False  # what is loaded is called
    in_place: bool = False  # it is an operator such as `+=`
    jumps: bool = False


@functools.lru_cache(maxsize=8192)
def names_in(code: types.CodeType) -> Names:
    """The names that a code object reaches."""
    found = _Reader(code).read()
    chains = {chain: chain in found.called for chain in found.chains}
    whole, stored, rebound = set(found.whole), set(found.stored), set(found.rebound)
    changed, taken, assigned = set(found.changed), set(found.taken), set(found.assigned)
    counted, unclear = set(found.counted), set(found.unclear)
    attributes, sets, texts = set(found.attributes), set(found.sets), set(found.texts)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = names_in(const)
            # a cell of the inner function is one of this function's own, or a local of it
            for chain in inner.chains:
                if chain[0][0] != CELL or chain[0][1] in code.co_freevars:
                    chains[chain] = chain in inner.called and chains.get(chain, True)
            whole |= inner.whole
            stored |= inner.stored
            rebound |= inner.rebound & set(code.co_freevars)
            changed |= inner.changed
            taken |= inner.taken
            assigned |= inner.assigned
            counted |= inner.counted
            unclear |= inner.unclear
            attributes |= inner.attributes
            sets |= inner.sets
            texts |= inner.texts
    called = frozenset(chain for chain, is_called in chains.items() if is_called)
    return Names(
        chains=tuple(chains),
        called=called,
        whole=frozenset(whole),
        stored=frozenset(stored),
        rebound=frozenset(rebound),
        changed=frozenset(changed),
        taken=frozenset(taken),
        assigned=frozenset(assigned),
        counted=frozenset(counted),
        unclear=frozenset(unclear),
        attributes=frozenset(attributes),
        sets=frozenset(sets),
        texts=frozenset(texts),
    )


def _ops(code: types.CodeType) -> Iterator[_Op]:
    before = 0  # what instructions that are left out put on the stack
    for one in dis.get_instructions(code):
        if one.opname in _NOISE:
            before += dis.stack_effect(one.opcode, one.arg, jump=False)
            continue
        if isinstance(one.argval, tuple) and (pair := _TWO_IN_ONE.fullmatch(one.opname)):
            yield from (
                _Op(f"{n}_FAST", v, -1 if n == "STORE" else 1) for n, v in zip(pair.groups(), one.argval, strict=True)
            )
            continue
        name = "BINARY_SUBSCR" if one.opname == "BINARY_OP" and one.argrepr == "[]" else one.opname
        in_place = one.opname.startswith("INPLACE_") or (one.opname == "BINARY_OP" and one.argrepr.endswith("="))
        effect = dis.stack_effect(one.opcode, one.arg, jump=False) + before
        before = 0
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        yield _Op(name, one.argval, effect, _is_of_a_call(one), in_place, jumps)


def _is_of_a_call(one: dis.Instruction) -> bool:
    """Whether an instruction loads what is called next, as far as its compiler says so."""
    if one.opname == "LOAD_METHOD":
        return True
    flagged = one.opname == "LOAD_GLOBAL" and sys.version_info >= (3, 11)
    flagged |= one.opname == "LOAD_ATTR" and sys.version_info >= (3, 12)
    return flagged and bool((one.arg or 0) & 1)


class _Reader:
    """Reads one code object."""

    def __init__(self, code: types.CodeType) -> None:
        self._code, self._ops = code, list(_ops(code))
        self._chains: dict[Chain, bool] = {}  # whether all that is done with it is calling it
        self._whole: set[Chain] = set()
        self._sets: set[str] = set()
        self._changed: set[Chain] = set()
        self._taken: set[Chain] = set()
        self._assigned: set[Chain] = set()
        self._counted: set[Chain] = set()
        self._unclear: set[Chain] = set()
        self._at: dict[int, Chain] = {}  # where a value is on the stack that a chain leads to
        self._aliases: dict[str, Chain] = {}  # locals that are assigned once, with what a chain leads to
        stores = Counter(op.value for op in self._ops if op.name == "STORE_FAST")
        taken = code.co_argcount + code.co_kwonlyargcount + bin(code.co_flags & 0x0C).count("1")
        self._once = {name for name, count in stores.items() if count == 1} - set(code.co_varnames[:taken])

    def read(self) -> Names:
        for number, op in enumerate(self._ops):
            after = self._ops[number + 1] if number + 1 < len(self._ops) else _Op("", None, 0)
            if op.name == "LOAD_ATTR" and after.name in ("LOAD_ATTR", "LOAD_METHOD") and after.value in CHANGING:
                self._sets.add(op.value)
            if (base := self._base(number, op)) is not None:
                self._follow(number, base)
            elif op.name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                self._note_changed(number, above=1, takes=op.name == "DELETE_SUBSCR")
            elif op.name == "STORE_SLICE":  # of Python 3.12 and newer
                self._note_changed(number, above=2)
            elif op.name in ("STORE_ATTR", "DELETE_ATTR"):
                self._note_changed(number, above=0)
        stored = frozenset(str(op.value) for op in self._ops if op.name in ("STORE_GLOBAL", "DELETE_GLOBAL"))
        rebound = {str(op.value) for op in self._ops if op.name in ("STORE_DEREF", "DELETE_DEREF")}
        called = frozenset(chain for chain, is_called in self._chains.items() if is_called)
        texts = frozenset(text for const in self._code.co_consts for text in _texts_in(const))
        self._sets.update(op.value for op in self._ops if op.name in ("STORE_ATTR", "DELETE_ATTR"))
        return Names(
            chains=tuple(self._chains),
            called=called,
            whole=frozenset(self._whole),
            stored=stored,
            rebound=frozenset(rebound.intersection(self._code.co_freevars)),
            changed=frozenset(self._changed),
            taken=frozenset(self._taken),
            assigned=frozenset(self._assigned),
            counted=frozenset(self._counted),
            unclear=frozenset(self._unclear),
            attributes=frozenset(self._code.co_names),
            sets=frozenset(self._sets),
            texts=texts,
        )

    def _base(self, number: int, op: _Op) -> Chain | None:
        """The chain of one step, or that of a local, that an instruction begins."""
        if op.name in ("LOAD_GLOBAL", "LOAD_NAME"):
            return ((GLOBAL, op.value),)
        if op.name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE") and op.value in self._code.co_freevars:
            return ((CELL, op.value),)
        if op.name == "IMPORT_NAME":
            level, names = self._constant(number - 2), self._constant(number - 1)
            # `import a.b` gives `a`, `from a.b import c` gives `a.b`
            module = op.value if names or level else op.value.partition(".")[0]
            return ((IMPORT, "." * (level or 0) + module),)
        if op.name in _LOCAL_LOADS:
            return self._aliases.get(op.value)
        return None

    def _constant(self, number: int) -> Any:
        return self._ops[number].value if number >= 0 and self._ops[number].name in _CONSTANTS else None

    def _follow(self, number: int, chain: Chain) -> None:
        at, is_called = number, False
        while True:
            self._at[at] = chain
            is_called = self._ops[at].calls
            ops = [*self._ops[at + 1 : at + 3], _Op("", None, 0), _Op("", None, 0)]
            following, after = ops[0], ops[1]
            if following.name in ("LOAD_ATTR", "LOAD_METHOD"):
                if following.value == "get" and self._is_key(at + 2):
                    chain, is_called = (*chain, (KEY, after.value)), False
                    break
                if following.value in CHANGING:
                    self._changed.add(chain)
                if following.value in TAKING:
                    self._taken.add(chain)
                if following.value == "set":  # of a context variable
                    self._assigned.add(chain)
                chain, at = (*chain, (ATTRIBUTE, following.value)), at + 1
            elif self._is_key(at + 1) and after.name == "BINARY_SUBSCR":
                chain, at = (*chain, (KEY, following.value)), at + 2
            elif following.name == "IMPORT_FROM":
                at = self._imported(at, chain)
                return
            else:
                before = self._ops[number - 1] if number else _Op("", None, 0)
                if following.name == "CONTAINS_OP" and self._is_key(number - 1):
                    chain = (*chain, (KEY, before.value))
                elif before.name == "LOAD_GLOBAL" and before.value in ("getattr", "hasattr") and self._is_name(at + 1):
                    chain, is_called = (*chain, (ATTRIBUTE, following.value)), False
                elif chain[-1] == (ATTRIBUTE, "getenv") and self._is_key(at + 1):
                    chain = (*chain[:-1], (ATTRIBUTE, "environ"), (KEY, following.value))
                elif following.name == "STORE_FAST" and following.value in self._once:
                    self._aliases[following.value] = chain
                else:
                    self._whole.add(chain)
                break
        self._chains[chain] = is_called and self._chains.get(chain, True)

    def _imported(self, at: int, module: Chain) -> int:
        """`from module import a, b`: each name is taken from the module, and is a local from there on."""
        while at + 2 < len(self._ops) and self._ops[at + 1].name == "IMPORT_FROM":
            chain = (*module, (ATTRIBUTE, self._ops[at + 1].value))
            self._chains[chain] = False
            if self._ops[at + 2].name == "STORE_FAST" and self._ops[at + 2].value in self._once:
                self._aliases[self._ops[at + 2].value] = chain
            else:
                self._whole.add(chain)
            at += 2
        return at

    def _is_key(self, number: int) -> bool:
        if not 0 <= number < len(self._ops) or self._ops[number].name not in _CONSTANTS:
            return False
        return type(self._ops[number].value) in _KEYS

    def _is_name(self, number: int) -> bool:
        return self._is_key(number) and isinstance(self._ops[number].value, str)

    def _note_changed(self, number: int, above: int, *, takes: bool = False) -> None:
        """What an item or attribute is stored in or deleted from lies below so many values on the stack."""
        start, counts = number, False
        while start and self._ops[start - 1].name.startswith(_EXCHANGES):
            start -= 1
        if start < number and self._ops[start - 1].in_place:  # `x[key] += 1` puts its result below what it is stored in
            number, above, counts = start, above + 1, True
        for at in range(number - 1, -1, -1):
            op = self._ops[at]
            if op.jumps:  # what lies below depends on the way
                self._unclear.update(self._at.values())
                return
            if above == 0 and not op.name.startswith(("STORE_", "POP_", "DELETE_")):  # it puts a value on top
                if at in self._at:
                    self._changed.add(self._at[at])
                    self._assigned.add(self._at[at])
                    if takes:
                        self._taken.add(self._at[at])
                    if counts:
                        self._counted.add(self._at[at])
                if op.name == "LOAD_ATTR":
                    self._sets.add(op.value)
                return
            above -= op.effect


def _texts_in(const: Any) -> Iterator[str]:
    if isinstance(const, str):
        yield const
    elif isinstance(const, (tuple, frozenset)):
        for item in const:
            yield from _texts_in(item)
