# SPDX-License-Identifier: Apache-2.0
"""Members of enumerations among the arguments of a call: plain values with a name.

A member is the same object as long as its class is, so it is compared by identity in a process, and by its class, name
and value in a store.
"""

from __future__ import annotations

import enum

from ..modules.memory_format import Unsupported
from ..modules.tree import PLAIN, class_name
from .function_spec import is_named


class Member:
    """A member of an enumeration as a part of a call. Raises Unsupported where it has no name of its own."""

    __slots__ = ("member", "text")

    def __init__(self, member: enum.Enum) -> None:
        kind = type(member)
        where = class_name(kind)
        if not is_named(kind):
            raise Unsupported(f"a member of {where}, which is not the class of that name")
        if kind.__members__.get(member.name or "") is not member:
            raise Unsupported(f"several members of {where} joined")
        if not _is_plain(member.value):
            raise Unsupported(f"a member of {where}, whose value is no plain one")
        self.member, self.text = member, f"{where}.{member.name}={member.value!r}"

    def __eq__(self, other: object) -> bool:
        return type(other) is Member and self.member is other.member

    def __hash__(self) -> int:
        return id(self.member)

    def __repr__(self) -> str:
        return self.text


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in PLAIN
