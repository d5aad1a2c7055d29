# SPDX-License-Identifier: Apache-2.0
"""Forms in which code changes what it reaches by name, and forms in which it keeps a table. No test lives here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HEAD = """
import collections, functools, itertools, random
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
    def forward(self, x):
        x = self.l(x)
"""


class Form(NamedTuple):
    """before: code of the module. body: code of the block, in which `x` is what its layer gave. seen: what it left."""

    before: str
    body: str
    seen: Callable[[Any], Any] = lambda module: None


_RECORDER = """
class Recorder:
    def __init__(self):
        self.seen, self.calls = [], 0
    def note(self, x):
        self.calls += 1
        self.seen.append(x.mean())
        return x * 2
RECORDER = Recorder()
"""
_ATTENTION = """
def recorder():
    maps = []
    def attention(x):
        weights = x.softmax(-1)
        maps.append(weights.detach())
        return weights * x
    attention.maps = maps
    return attention
attention = recorder()
"""
_COUNTED = """
def counted():
    n = 0
    def scale(x):
        nonlocal n
        n += 1
        return x * n
    return scale
"""


def _sums(tensors: Any) -> list[float]:
    return [float(tensor.sum()) for tensor in tensors]


# what compiled code would not do: the block runs as it is
CHANGES = {
    "a list that gets tensors": Form("SEEN = []", "SEEN.append(x.mean())\nreturn x * 2", lambda m: _sums(m.SEEN)),
    "a list that gets numbers": Form("SEEN = []", "SEEN.append(3)\nreturn x * len(SEEN)", lambda m: m.SEEN),
    "a list that is added to": Form("SEEN = []", "global SEEN\nSEEN += [1]\nreturn x * len(SEEN)", lambda m: m.SEEN),
    "a dict that gets tensors": Form(
        "SEEN = {}", "SEEN[len(SEEN)] = x.sum()\nreturn x * 2", lambda m: _sums(m.SEEN.values())
    ),
    "a number in a dict": Form(
        "SEEN = collections.Counter()", "SEEN['n'] += 1\nreturn x * SEEN['n']", lambda m: dict(m.SEEN)
    ),
    "a list in a defaultdict": Form(
        "SEEN = collections.defaultdict(list)", "SEEN['n'].append(x.sum())\nreturn x", lambda m: _sums(m.SEEN["n"])
    ),
    "a state in a dict": Form(
        "S = {}", "S['h'] = S.get('h', 0) * 0.5 + x.mean((0, 1))\nreturn x * S['h']", lambda m: _sums(m.S.values())
    ),
    "a deque": Form("Q = collections.deque(maxlen=3)", "Q.append(x.shape[0])\nreturn x * len(Q)", lambda m: list(m.Q)),
    "a global number": Form("N = 0", "global N\nN += 1\nreturn x * N", lambda m: m.N),
    "a global tensor": Form(
        "S = torch.zeros(8)", "global S\nS = S + x.sum((0, 1))\nreturn x * 2", lambda m: float(m.S.sum())
    ),
    "a state that was not there": Form(
        "H = None",
        "global H\nH = x.mean((0, 1)) if H is None else H * 0.5 + x.mean((0, 1))\nreturn x * H",
        lambda m: float(m.H.sum()),
    ),
    "the numbers of a global tensor": Form(
        "S = torch.zeros(8)", "S.add_(x.sum((0, 1)))\nreturn x * 2", lambda m: float(m.S.sum())
    ),
    "a number of a class": Form("class C:\n    n = 0", "C.n += 1\nreturn x * C.n", lambda m: m.C.n),
    "a number of an object": Form("class C: pass\nO = C()\nO.n = 0", "O.n += 1\nreturn x * O.n", lambda m: m.O.n),
    "a number of a function": Form(
        "def f(x):\n    f.n = getattr(f, 'n', 0) + 1\n    return x * f.n", "return f(x)", lambda m: m.f.n
    ),
    "a tensor on an object": Form(
        "class C: pass\nO = C()", "O.last = x.detach()\nreturn x * 2", lambda m: float(m.O.last.sum())
    ),
    "what a method of an object notes": Form(
        _RECORDER, "return RECORDER.note(x)", lambda m: (m.RECORDER.calls, _sums(m.RECORDER.seen))
    ),
    "a free variable": Form(_COUNTED + "scale = counted()", "return scale(x)"),
    "a list in a closure": Form(_ATTENTION, "return attention(x)", lambda m: _sums(m.attention.maps)),
    "a default": Form(
        "def f(x, seen={}):\n    seen[len(seen)] = x\n    return x * len(seen)",
        "return f(x)",
        lambda m: _sums(m.f.__defaults__[0].values()),
    ),
    "what a function in a registry notes": Form(
        "SEEN = []\ndef a(x):\n    SEEN.append(x.mean())\n    return x * 2\nREGISTRY = {'a': a}",
        "return REGISTRY['a'](x)",
        lambda m: _sums(m.SEEN),
    ),
    "a list of an object, in place": Form(
        "class C: pass\nO = C()\nO.seen = []", "O.seen += [x.mean()]\nreturn x * 2", lambda m: _sums(m.O.seen)
    ),
    "a number in a dict by its key": Form(
        "D = {}", "D['n'] = D.get('n', 0) + 1\nreturn x * D['n']", lambda m: dict(m.D)
    ),
    "a number of a slot": Form(
        "class C:\n    __slots__ = ('n',)\nO = C()\nO.n = 0", "O.n += 1\nreturn x * O.n", lambda m: m.O.n
    ),
    "a number, on a condition": Form(
        "class C: pass\nO = C()\nO.n = 0", "O.n += 1 if x.shape[0] else 2\nreturn x * O.n", lambda m: m.O.n
    ),
    "a number of NumPy's": Form("N = np.int64(0)", "global N\nN = N + 1\nreturn x * int(N)", lambda m: int(m.N)),
    "numbers of an array": Form("A = np.zeros(2)", "A[0] += 1\nreturn x * float(A[0])", lambda m: m.A.tolist()),
    "what a decorated function counts": Form(
        "class C:\n    n = 0\n@torch.no_grad()\ndef f(x):\n    C.n += 1\n    return x * C.n",
        "return f(x)",
        lambda m: m.C.n,
    ),
    "what a partial counts": Form(
        "class C:\n    n = 0\ndef g(x):\n    C.n += 1\n    return x * C.n\nf = functools.partial(g)",
        "return f(x)",
        lambda m: m.C.n,
    ),
    "what a class method counts": Form(
        "class C:\n    n = 0\n    @classmethod\n    def go(cls):\n        cls.n += 1\n        return cls.n",
        "return x * C.go()",
        lambda m: m.C.n,
    ),
    "what making an object counts": Form(
        "class C:\n    n = 0\n    def __init__(self):\n        C.n += 1", "C()\nreturn x * C.n", lambda m: m.C.n
    ),
    "an iterator of an object": Form(
        "class C:\n    def __init__(self):\n        self.c = itertools.count(1)\n"
        "    def go(self):\n        return next(self.c)\nO = C()",
        "return x * O.go()",
    ),
    "NumPy's numbers of a state of its own": Form(
        "R = np.random.RandomState(0)", "return x * (1 + float(R.rand()))", lambda m: float(m.R.rand())
    ),
    "an iterator": Form("N = itertools.count(1)", "return x * next(N)"),
    "a generator": Form("def n():\n    yield from range(1, 99)\nN = n()", "return x * next(N)"),
    "Python's random numbers": Form("", "return x * (1 + random.random())", lambda m: m.random.random()),
    "a generator of random numbers": Form(
        "R = random.Random(0)", "return x * (1 + R.random())", lambda m: m.R.random()
    ),
    "NumPy's random numbers": Form("", "return x * (1 + float(np.random.rand()))", lambda m: float(m.np.random.rand())),
    "a generator of NumPy's": Form(
        "R = np.random.default_rng(0)", "return x * (1 + float(R.random()))", lambda m: float(m.R.random())
    ),
}
# a table that code makes once: a graph makes its own, and the block is compiled
KEPT = {
    "a table in a dict": Form(
        "T = {}",
        "if x.dtype not in T:\n    T[x.dtype] = torch.arange(8.0)\nreturn x * T[x.dtype]",
    ),
    "a global table": Form(
        "T = None",
        "global T\nif T is None:\n    T = torch.arange(8.0)\nreturn x * T",
    ),
    "a table of an object": Form(
        "class C:\n    table = None\n    def get(self):\n        if self.table is None:\n"
        "            self.table = torch.arange(8.0)\n        return self.table\nO = C()",
        "return x * O.get()",
    ),
    "a table for a size": Form(
        "class M:\n    size = table = None",
        "n = x.shape[1]\nif M.size != n:\n    M.size, M.table = n, torch.arange(8.0) * n\nreturn x * M.table",
    ),
    "a table in a default": Form(
        "def get(n, tables={}):\n    if n not in tables:\n        tables[n] = torch.arange(8.0)\n    return tables[n]",
        "return x * get(8)",
    ),
    "an object with a table": Form(
        "class Rope:\n    def __init__(self):\n        self.table = torch.arange(8.0)\nROPES = {}",
        "if x.dtype not in ROPES:\n    ROPES[x.dtype] = Rope()\nreturn x * ROPES[x.dtype].table",
    ),
    "a table in a dict of a function's": Form(
        "TABLES = {}\ndef tables():\n    return TABLES",
        "held = tables()\nif x.dtype not in held:\n    held[x.dtype] = torch.arange(8.0)\nreturn x * held[x.dtype]",
    ),
    "a table that functools keeps": Form(
        "@functools.lru_cache\ndef get(n):\n    return torch.arange(n).float()", "return x * get(8)"
    ),
    "a flag that is set": Form("MODE = 'a'", "global MODE\nMODE = 'of two'\nreturn x * 2"),
}


@contextmanager
def module_of(form: Form, folder: Path, name: str) -> Iterator[Any]:
    """A module with the code of a form, which `sys.modules` has meanwhile."""
    body = "".join(f"        {line}\n" for line in form.body.splitlines())
    path = folder / f"{name}.py"
    path.write_text(f"{HEAD}{body}\n{form.before}\n")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(path.read_text(), str(path), "exec"), vars(module))  # noqa: S102
        yield module
    finally:
        del sys.modules[name]
