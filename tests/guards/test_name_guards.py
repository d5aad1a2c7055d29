# SPDX-License-Identifier: Apache-2.0
"""What a block's code reaches by name, in each form that code has for it: a change is seen, and so is the way back."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import MOVES, TOLERANCE, graphs_as_they_are
from torch import nn

import nexfort_engine
from nexfort_engine.capture.reached_names import rows_of
from nexfort_engine.capture.source_hashes import walked
from nexfort_engine.guards.name_guards import Dependence, Resolver, Watched, classes_in
from nexfort_engine.guards.value_digests import digest

HEAD = """
import functools, math, os
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(8, 8)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)
"""
PLAIN = "class Block(Base):\n    def forward(self, x):\n        return x + {}\n"
# form -> (code of the module, the change, given the module `m`)
FORMS = {
    "a function of torch through a module": (PLAIN.format("F.gelu(self.l(x))"), "F.gelu = lambda t: torch.relu(t) * 3"),
    "a function of torch by its own name": (PLAIN.format("silu(self.l(x))"), "m.silu = lambda t: torch.relu(t) * 3"),
    "an operator of torch": (PLAIN.format("torch.tanh(self.l(x))"), "torch.tanh = lambda t: t * 3"),
    "what a function of torch calls": (
        PLAIN.format("F.layer_norm(self.l(x), (8,))"),
        "torch.layer_norm = lambda t, *a: t * 3",
    ),
    "what a layer of torch calls": (PLAIN.format("self.l(x)"), "F.linear = lambda t, w, b: t @ w * 3"),
    "the forward of a layer of torch": (PLAIN.format("self.l(x)"), "nn.Linear.forward = lambda s, t: t @ s.weight * 3"),
    "the call of all modules": (PLAIN.format("self.l(x)"), "nn.Module.__call__ = lambda s, *a: s.forward(*a) * 1.5"),
    "the forward of the block": (PLAIN.format("self.l(x)"), "m.Block.forward = lambda s, t: t * 3 + s.l(t)"),
    "the forward of its base": (
        "class Middle(Base):\n    def forward(self, x):\n        return self.l(x)\n"
        "class Block(Middle):\n    def forward(self, x):\n        return x + super().forward(x)\n",
        "m.Middle.forward = lambda s, t: s.l(t) * 3",
    ),
    "a method": (
        "class Block(Base):\n    def half(self, x):\n        return self.l(x)\n"
        "    def forward(self, x):\n        return x + self.half(x)\n",
        "m.Block.half = lambda s, t: s.l(t) * 3",
    ),
    "a method that the class inherits, put on the class": (
        "class Middle(Base):\n    def half(self, x):\n        return self.l(x)\n"
        "class Block(Middle):\n    def forward(self, x):\n        return x + self.half(x)\n",
        "m.Block.half = lambda s, t: s.l(t) * 3",
    ),
    "a static method of a helper": (
        "class Helper:\n    @staticmethod\n    def scale(x):\n        return x * 2\n"
        + PLAIN.format("Helper.scale(self.l(x))"),
        "m.Helper.scale = staticmethod(lambda t: t * 5)",
    ),
    "a method of an object": (
        "class Helper:\n    def __init__(self):\n        self.by = 2.0\n"
        "    def scale(self, x):\n        return x * self.by\n"
        "helper = Helper()\n" + PLAIN.format("helper.scale(self.l(x))"),
        "m.Helper.scale = lambda s, t: t * 5",
    ),
    "an attribute of an object that its method reads": (
        "class Helper:\n    def __init__(self):\n        self.by = 2.0\n"
        "    def scale(self, x):\n        return x * self.by\n"
        "helper = Helper()\n" + PLAIN.format("helper.scale(self.l(x))"),
        "m.helper.by = 5.0",
    ),
    "a helper function": (
        "def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"),
        "m.helper = lambda t: t * 5",
    ),
    "the code of a helper function": (
        "def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"),
        "m.helper.__code__ = (lambda x: x * 5).__code__",
    ),
    "a default of a helper function": (
        "def helper(x, by=2.0):\n    return x * by\n" + PLAIN.format("helper(self.l(x))"),
        "m.helper.__defaults__ = (5.0,)",
    ),
    "what a helper calls": (
        "def inner(x):\n    return x * 2\ndef helper(x):\n    return inner(x)\n" + PLAIN.format("helper(self.l(x))"),
        "m.inner = lambda t: t * 5",
    ),
    "a wrapped function": (
        "def wrap(f):\n    @functools.wraps(f)\n    def wrapper(*a):\n        return f(*a)\n    return wrapper\n"
        "@wrap\ndef helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"),
        "m.helper = m.wrap(lambda t: t * 5)",
    ),
    "what a closure holds": (
        "def make(by):\n    def helper(x):\n        return x * by\n    return helper\nhelper = make(2.0)\n"
        + PLAIN.format("helper(self.l(x))"),
        "m.helper.__closure__[0].cell_contents = 5.0",
    ),
    "a partial": (
        "def scale(by, x):\n    return x * by\nhelper = functools.partial(scale, 2.0)\n"
        + PLAIN.format("helper(self.l(x))"),
        "m.helper = functools.partial(m.scale, 5.0)",
    ),
    "a bound method by name": (
        "class Helper:\n    by = 2.0\n    def scale(self, x):\n        return x * self.by\n"
        "helper = Helper().scale\n" + PLAIN.format("helper(self.l(x))"),
        "m.Helper.by = 5.0",
    ),
    "a function in a registry": (
        "REGISTRY = {'half': lambda x: x * 2}\n" + PLAIN.format("REGISTRY['half'](self.l(x))"),
        "m.REGISTRY['half'] = lambda t: t * 5",
    ),
    "a function in a registry by a name that is an attribute": (
        "REGISTRY = {'half': lambda x: x * 2}\nclass Block(Base):\n    kind = 'half'\n"
        "    def forward(self, x):\n        return x + REGISTRY[self.kind](self.l(x))\n",
        "m.REGISTRY['half'] = lambda t: t * 5",
    ),
    "functions in a list": (
        "STEPS = [lambda x: x * 2]\nclass Block(Base):\n    def forward(self, x):\n        y = self.l(x)\n"
        "        for step in STEPS:\n            y = step(y)\n        return x + y\n",
        "m.STEPS.append(lambda t: t * 5)",
    ),
    "a number": ("SCALE = 2.0\n" + PLAIN.format("self.l(x) * SCALE"), "m.SCALE = 5.0"),
    "a flag": ("TWICE = False\n" + PLAIN.format("(self.l(x) * 5 if TWICE else self.l(x))"), "m.TWICE = True"),
    "a tuple": ("SCALES = (1.0, 2.0)\n" + PLAIN.format("self.l(x) * SCALES[1]"), "m.SCALES = (1.0, 5.0)"),
    "a number in a class": (
        "class Settings:\n    scale = 2.0\n" + PLAIN.format("self.l(x) * Settings.scale"),
        "m.Settings.scale = 5.0",
    ),
    "a number in an object": (
        "import types\nsettings = types.SimpleNamespace(scale=2.0)\n" + PLAIN.format("self.l(x) * settings.scale"),
        "m.settings.scale = 5.0",
    ),
    "a number in a dict": (
        "CONFIG = {'scale': 2.0}\n" + PLAIN.format("self.l(x) * CONFIG['scale']"),
        "m.CONFIG['scale'] = 5.0",
    ),
    "a key that was not there": (
        "CONFIG = {}\n" + PLAIN.format("self.l(x) * CONFIG.get('scale', 2.0)"),
        "m.CONFIG['scale'] = 5.0",
    ),
    "a key that was not in it": (
        "CONFIG = {}\n" + PLAIN.format("(self.l(x) * 5 if 'scale' in CONFIG else self.l(x))"),
        "m.CONFIG['scale'] = 5.0",
    ),
    "a variable of the environment": (
        PLAIN.format("(self.l(x) * 5 if os.environ.get('NEXFORT_TEST_FORM') else self.l(x))"),
        "os.environ['NEXFORT_TEST_FORM'] = '1'",
    ),
    "an attribute of a module that was not there": (
        "import types\nsettings = types.ModuleType('settings')\n"
        + PLAIN.format("self.l(x) * getattr(settings, 'scale', 2.0)"),
        "m.settings = types.SimpleNamespace(scale=5.0)",
    ),
    "an import inside the code": (
        "class Block(Base):\n    def forward(self, x):\n        from torch.nn.functional import softplus\n"
        "        return x + softplus(self.l(x))\n",
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a module that is a local name": (
        "class Block(Base):\n    def forward(self, x):\n        f = F\n        return x + f.mish(self.l(x))\n",
        "F.mish = lambda t: torch.relu(t) * 5",
    ),
    "a builtin that a module hides": (PLAIN.format("abs(self.l(x)) * 2"), "m.abs = lambda t: t * 5"),
    "a function in a dict of an object": (
        "class Helper:\n    pass\nhelper = Helper()\nhelper.step = lambda x: x * 2\n"
        + PLAIN.format("helper.step(self.l(x))"),
        "m.helper.step = lambda t: t * 5",
    ),
    "a property of an object": (
        "class Helper:\n    value = 2.0\n    @property\n"
        "    def scale(self):\n        return self.value\nhelper = Helper()\n"
        + PLAIN.format("self.l(x) * helper.scale"),
        "m.helper.value = 5.0",
    ),
    "a cached function": (
        "@functools.lru_cache\ndef scale(n):\n    return math.sqrt(n) * FACTOR\nFACTOR = 1.0\n"
        + PLAIN.format("self.l(x) * scale(4)"),
        "m.FACTOR = 5.0; m.scale.cache_clear()",
    ),
    "an attribute that the block did not have": (
        PLAIN.format("self.l(x) * (getattr(self, 'scale', None) or 2.0)"),
        "[setattr(b, 'scale', 5.0) for b in net.blocks]",
    ),
    "an attribute that its class did not have": (
        PLAIN.format("self.l(x) * (getattr(self, 'scale', None) or 2.0)"),
        "m.Block.scale = 5.0",
    ),
    "an attribute that a part of it did not have": (
        PLAIN.format("self.l(x) * (5.0 if hasattr(self.l, 'twice') else 2.0)"),
        "[setattr(b.l, 'twice', True) for b in net.blocks]",
    ),
    "a part that it did not have": (
        PLAIN.format("(self.l(x) if getattr(self, 'more', None) is None else self.more(self.l(x)))"),
        "[setattr(b, 'more', nn.Tanh()) for b in net.blocks]",
    ),
    "a module in a plain list": (
        "class Scale(nn.Module):\n    by = None\n"
        "    def __init__(self):\n        super().__init__()\n        self.by = 2.0\n"
        "    def forward(self, x):\n        return x * self.by\n"
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n        self.parts = [Scale()]\n"
        "    def forward(self, x):\n        return x + self.parts[0](self.l(x))\n",
        "[setattr(b.parts[0], 'by', 5.0) for b in net.blocks]",
    ),
    "a function that is an attribute": (
        "def helper(x):\n    return x * 2\nclass Block(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.step = helper\n    def forward(self, x):\n        return x + self.step(self.l(x))\n",
        "[setattr(b, 'step', lambda t: t * 5) for b in net.blocks]",
    ),
    "the call of an object that is an attribute": (
        "class Step:\n    def __call__(self, x):\n        return x * 2\nclass Block(Base):\n    def __init__(self):\n"
        "        super().__init__()\n        self.step = Step()\n"
        "    def forward(self, x):\n        return x + self.step(self.l(x))\n",
        "m.Step.__call__ = lambda s, t: t * 5",
    ),
    "a method put on a layer of torch": (
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Conv1d(5, 5, 3, padding=1)\n    def forward(self, x):\n        return x + self.l(x)\n",
        "[setattr(b.l, '_conv_forward', lambda x, w, bias: F.conv1d(F.pad(x, (1, 1), 'circular') * 3, w, bias))"
        " for b in net.blocks]",
    ),
    "a method of a layer of torch": (
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Conv1d(5, 5, 3, padding=1)\n    def forward(self, x):\n        return x + self.l(x)\n",
        "nn.Conv1d._conv_forward = lambda s, x, w, bias: F.conv1d(x * 3, w, bias, padding=1)",
    ),
    "a method put on the block": (
        "class Block(Base):\n    def half(self, x):\n        return self.l(x)\n"
        "    def forward(self, x):\n        return x + self.half(x)\n",
        "[setattr(b, 'half', lambda t: t * 3) for b in net.blocks]",
    ),
    "a static method of the block": (
        "class Block(Base):\n    @staticmethod\n    def act(x):\n        return x * 2\n"
        "    def forward(self, x):\n        return x + self.act(self.l(x))\n",
        "m.Block.act = staticmethod(lambda t: t * 5)",
    ),
    "an operator as an attribute of the block's class": (
        "class Block(Base):\n    act = torch.tanh\n    def forward(self, x):\n        return x + self.act(self.l(x))\n",
        "m.Block.act = staticmethod(lambda t: t * 5)",
    ),
    "an operator as an attribute of a helper's class": (
        "class Ops:\n    act = staticmethod(torch.tanh)\nclass Block(Base):\n    ops = Ops\n"
        "    def forward(self, x):\n        return x + self.ops.act(self.l(x))\n",
        "m.Ops.act = staticmethod(lambda t: t * 5)",
    ),
    "what a class method of a helper reads": (
        "class Registry:\n    active = 'one'\n    known = {}\n    @classmethod\n    def get(cls):\n"
        "        return cls.known[cls.active]\nRegistry.known.update(one=lambda x: x * 2, two=lambda x: x * 5)\n"
        + PLAIN.format("Registry.get()(self.l(x))"),
        "m.Registry.active = 'two'",
    ),
    "what a helper that no name leads to reads of its class": (
        "class Helper:\n    by = 2.0\n    def scale(self, x):\n        return x * self.by\ndef made():\n"
        "    return [Helper()]\nHELPERS = {0: made}\n" + PLAIN.format("HELPERS[0]()[0].scale(self.l(x))"),
        "m.Helper.by = 5.0",
    ),
    "a module in a tuple that is taken apart": (
        "class Block(Base):\n    def forward(self, x):\n        f, g = F, torch\n"
        "        return x + f.softplus(self.l(x))\n",
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a module chosen by a condition": (
        PLAIN.format("(F if x.dim() == 3 else torch).softplus(self.l(x))"),
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a module assigned twice": (
        "class Block(Base):\n    def forward(self, x):\n        f = torch\n"
        "        if x.dim() == 3:\n            f = F\n"
        "        return x + f.softplus(self.l(x))\n",
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a module as a default": (
        "def helper(x, f=F):\n    return f.softplus(x)\n" + PLAIN.format("helper(self.l(x))"),
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a module in a list": (
        "MODULES = [F]\nclass Block(Base):\n    def forward(self, x):\n        for one in MODULES:\n"
        "            x = x + one.softplus(self.l(x))\n        return x\n",
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a module in a closure": (
        "class Block(Base):\n    def forward(self, x):\n        f = F\n        def inner(y):\n"
        "            return f.softplus(y)\n        return x + inner(self.l(x))\n",
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "an attribute by a name that is an attribute": (
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n        self.act = 'softplus'\n"
        "    def forward(self, x):\n        return x + getattr(F, self.act)(self.l(x))\n",
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "an attribute by a name in a dict": (
        "KINDS = {3: 'softplus'}\n" + PLAIN.format("getattr(F, KINDS[x.dim()])(self.l(x))"),
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a module by its name": (
        "import importlib\n" + PLAIN.format("importlib.import_module('torch.nn.functional').softplus(self.l(x))"),
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a global by its name": (
        "SCALE = 2.0\n" + PLAIN.format("self.l(x) * globals()['SCALE']"),
        "m.SCALE = 5.0",
    ),
    "a method of tensors": (
        PLAIN.format("self.l(x).softmax(-1)"),
        "torch.Tensor.softmax = lambda t, d: torch.softmax(t * 5, d) * 3",
    ),
    "a variable of the environment by getenv": (
        PLAIN.format("self.l(x) * float(os.getenv('NEXFORT_TEST_FORM', '2'))"),
        "os.environ['NEXFORT_TEST_FORM'] = '5'",
    ),
    "a variable of the environment by a helper": (
        "def flag(name):\n    return float(os.environ.get(name, 2))\n"
        + PLAIN.format("self.l(x) * flag('NEXFORT_TEST_FORM')"),
        "os.environ['NEXFORT_TEST_FORM'] = '5'",
    ),
    "a context variable": (
        "from contextvars import ContextVar\nSCALE = ContextVar('scale', default=2.0)\n"
        + PLAIN.format("self.l(x) * SCALE.get()"),
        "m.SCALE.set(5.0)",
    ),
    "a context variable with a default": (
        "from contextvars import ContextVar\nSCALE = ContextVar('scale')\n"
        + PLAIN.format("self.l(x) * SCALE.get(2.0)"),
        "m.SCALE.set(5.0)",
    ),
    "the code of a function that is an attribute": (
        "def step(x):\n    return x * 2\nclass Block(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.step = step\n    def forward(self, x):\n        return x + self.step(self.l(x))\n",
        "m.step.__code__ = (lambda x: x * 5).__code__",
    ),
    "a default of a function that is an attribute": (
        "def step(x, *, by=2.0):\n    return x * by\nclass Block(Base):\n    def __init__(self):\n"
        "        super().__init__()\n        self.step = step\n"
        "    def forward(self, x):\n        return x + self.step(self.l(x))\n",
        "m.step.__kwdefaults__ = {'by': 5.0}",
    ),
    "what a closure that is an attribute holds": (
        "def make(by):\n    def step(x):\n        return x * by\n    return step\nclass Block(Base):\n"
        "    def __init__(self):\n        super().__init__()\n        self.step = make(2.0)\n"
        "    def forward(self, x):\n        return x + self.step(self.l(x))\n",
        "[setattr(b.step.__closure__[0], 'cell_contents', 5.0) for b in net.blocks]",
    ),
    "the words of a partial that is an attribute": (
        "def scale(x, by):\n    return x * by\nclass Block(Base):\n    def __init__(self):\n"
        "        super().__init__()\n        self.step = functools.partial(scale, by=2.0)\n"
        "    def forward(self, x):\n        return x + self.step(self.l(x))\n",
        "[b.step.keywords.update(by=5.0) for b in net.blocks]",
    ),
    "an attribute of equal value and another type": (
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n        self.n = 1\n"
        "    def forward(self, x):\n        return x + self.l(x) * (5.0 if self.n is True else 2.0)\n",
        "[setattr(b, 'n', True) for b in net.blocks]",
    ),
    "a number of equal value and another type": (
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n        self.n = 2\n"
        "    def forward(self, x):\n        return x + self.l(x) * (5.0 if isinstance(self.n, float) else 2.0)\n",
        "[setattr(b, 'n', 2.0) for b in net.blocks]",
    ),
    "the order of a dict that is an attribute": (
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.d = {'a': True, 'b': False}\n"
        "    def forward(self, x):\n        return x + self.l(x) * (2.0 if next(iter(self.d.values())) else 5.0)\n",
        "[setattr(b, 'd', {'b': False, 'a': True}) for b in net.blocks]",
    ),
    "a dict of a class of its own": (
        "class Config(dict):\n    pass\nCONFIG = Config(scale=2.0)\ndef read(name):\n    return CONFIG[name]\n"
        + PLAIN.format("self.l(x) * read('scale')"),
        "m.CONFIG['scale'] = 5.0",
    ),
    "deep in containers": (
        "CONFIG = {'a': [{'b': {'c': 2.0}}]}\ndef read(a, i, b, c):\n    return CONFIG[a][i][b][c]\n"
        + PLAIN.format("self.l(x) * read('a', 0, 'b', 'c')"),
        "m.CONFIG['a'][0]['b']['c'] = 5.0",
    ),
    "one of many items": (
        "TABLE = [2.0] * 3000\ndef read(i):\n    return TABLE[i * 1000]\n" + PLAIN.format("self.l(x) * read(2)"),
        "m.TABLE[2000] = 5.0",
    ),
    "a class made in a function": (
        "def make(by):\n    class Helper:\n        @staticmethod\n        def scale(x):\n            return x * by\n"
        "    return Helper\nHelper = make(2.0)\n" + PLAIN.format("Helper.scale(self.l(x))"),
        "m.Helper = m.make(5.0)",
    ),
    "a class made in a function with another value": (
        "def make(value):\n    class Helper:\n        by = value\n    return Helper\nHELPERS = {'one': make(2.0)}\n"
        "def find(name):\n    return HELPERS[name]\n" + PLAIN.format("self.l(x) * find('one').by"),
        "m.HELPERS['one'].by = 5.0",
    ),
    "the flags of a pattern": (
        "import re\nPATTERN = re.compile('A')\n" + PLAIN.format("self.l(x) * (5.0 if PATTERN.match('a') else 2.0)"),
        "import re; m.PATTERN = re.compile('A', re.I)",
    ),
    "a static method of a class that is an attribute": (
        "class Ops:\n    @staticmethod\n    def act(x):\n        return x * 2\nclass Block(Base):\n"
        "    def __init__(self):\n        super().__init__()\n        self.ops = Ops\n"
        "    def forward(self, x):\n        return x + self.ops.act(self.l(x))\n",
        "m.Ops.act = staticmethod(lambda t: t * 5)",
    ),
    "a value of a class that is an attribute": (
        "class Ops:\n    by = 2.0\nclass Block(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ops = Ops\n    def forward(self, x):\n        return x + self.l(x) * self.ops.by\n",
        "m.Ops.by = 5.0",
    ),
    "a value of the class of an object that is an attribute": (
        "class Ops:\n    by = 2.0\nclass Block(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ops = Ops()\n    def forward(self, x):\n        return x + self.l(x) * self.ops.by\n",
        "m.Ops.by = 5.0",
    ),
    "a value of a metaclass": (
        "class Meta(type):\n    by = 2.0\nclass Ops(metaclass=Meta):\n    pass\n" + PLAIN.format("self.l(x) * Ops.by"),
        "m.Meta.by = 5.0",
    ),
    "what a descriptor reads": (
        "class Reads:\n    def __get__(self, owner, kind):\n        return VALUE\nVALUE = 2.0\nclass Ops:\n"
        "    by = Reads()\nops = Ops()\n" + PLAIN.format("self.l(x) * ops.by"),
        "m.VALUE = 5.0",
    ),
    "the getattr of an object": (
        "class Ops:\n    def __getattr__(self, name):\n        if name == 'by':\n            return VALUE\n"
        "        raise AttributeError(name)\nVALUE = 2.0\nops = Ops()\n" + PLAIN.format("self.l(x) * ops.by"),
        "m.VALUE = 5.0",
    ),
    "the getattr of a module": (
        "import types\nspace = types.ModuleType('space')\nspace.__getattr__ = lambda name: VALUE\nVALUE = 2.0\n"
        + PLAIN.format("self.l(x) * space.by"),
        "m.VALUE = 5.0",
    ),
    "a key made of strings": (
        "TABLE = {'a1': 2.0}\nclass Block(Base):\n    n = 1\n    def forward(self, x):\n"
        "        return x + self.l(x) * TABLE[f'a{self.n}']\n",
        "m.TABLE['a1'] = 5.0",
    ),
    "a function given to map": (
        PLAIN.format("list(map(F.softplus, [self.l(x)]))[0]"),
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
}
NOT_COMPILED = {"the call of all modules": "the call of all modules was replaced"}
_numbers = itertools.count()


@pytest.fixture
def form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], types.ModuleType]]:
    """Makes a module of a form's code; afterwards torch has its own functions again."""
    owners = [torch, torch.nn.functional, nn.Linear, nn.Conv1d, nn.Module, torch.Tensor]
    before = [(owner, dict(vars(owner))) for owner in owners]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("NEXFORT_TEST_FORM", raising=False)

    def make(code: str) -> types.ModuleType:
        name = f"nexfort_form_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(HEAD + textwrap.dedent(code))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for owner, names in before:
        for name in set(vars(owner)) - set(names):
            delattr(owner, name)
        for name, value in names.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.startswith("nexfort_form_")]:
        del sys.modules[name]


def _run(module: Any) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return module(torch.randn(2, 5, 8))


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _net(module: types.ModuleType) -> Any:
    torch.manual_seed(0)
    return module.Net().eval().requires_grad_(False)


def _change(text: str, module: types.ModuleType, net: Any) -> None:
    import os

    names = {"m": module, "net": net, "F": torch.nn.functional, "torch": torch, "nn": nn, "os": os}
    exec(text, {**names, "types": types, "functools": functools})  # noqa: S102  # the change is a statement of the form


@pytest.mark.parametrize("name", FORMS)
def test_a_change_is_seen_in_each_form(name: str, form: Callable[[str], types.ModuleType]) -> None:
    code, change = FORMS[name]
    module = form(code)
    net = _net(module)
    with graphs_as_they_are():
        compiled = nexfort_engine.compile(net)
        before = _run(net)
        assert _distance(_run(compiled), before) < TOLERANCE
        told = compiled.report.as_dict()
        assert told["artefacts_compiled"] > 0 and not told["eager"]
        _change(change, module, net)
        changed = _run(net)
        assert _distance(changed, before) > MOVES, "the change does not matter"
        assert _distance(_run(compiled), changed) < TOLERANCE
        reasons = [row["reason"] for row in compiled.report.as_dict()["eager"]]
        assert not reasons or NOT_COMPILED.get(name, "it could have been compiled") in reasons[0]


@pytest.mark.parametrize("name", FORMS)
def test_what_stays_needs_nothing_new(name: str, form: Callable[[str], types.ModuleType]) -> None:
    with graphs_as_they_are():
        net = _net(form(FORMS[name][0]))
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        mark = compiled.report.mark()
        again = nexfort_engine.compile(net)
        assert _distance(_run(again), _run(net)) < TOLERANCE
        assert again.report.as_dict()["artefacts_compiled"] == 0
        _run(compiled)
        assert not compiled.report.since(mark)["artefacts"]


def test_the_way_back_is_the_old_artefact(form: Callable[[str], types.ModuleType]) -> None:
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    with graphs_as_they_are():
        net, own = _net(module), module.helper
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        for function in (lambda t: t * 5, own, lambda t: t * 5, own):  # the same code twice: a function made anew
            module.helper = function
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        told = compiled.report.as_dict()
        assert len(told["variants"]) == 1 and "helper" in told["variants"][0]["reason"]


def test_a_function_made_anew_for_each_step_costs_one_artefact(form: Callable[[str], types.ModuleType]) -> None:
    module = form(
        "def make(by):\n    return lambda x: x * by\nhelper = make(2.0)\n" + PLAIN.format("helper(self.l(x))")
    )
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        for _ in range(20):
            module.helper = module.make(2.0)
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["variants"]
        assert len(compiled._nexfort_engine.known.watched) < 400, "functions that are gone are still watched"


def test_what_keeps_changing_ends_eager_and_goes_on_where_it_was(form: Callable[[str], types.ModuleType]) -> None:
    module = form("SCALE = 2.0\n" + PLAIN.format("self.l(x) * SCALE"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        for number in range(12):
            module.SCALE = 2.0 + number
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        told = compiled.report.as_dict()
        assert "keeps changing" in told["eager"][0]["reason"] and "SCALE" in told["eager"][0]["reason"]
        assert sum(row["region"] == "blocks.0" for row in told["artefacts"]) == 8
        module.SCALE = 3.0
        mark = compiled.report.mark()
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.since(mark)["eager"], "it has an artefact for this value"


def test_a_cache_of_the_code_s_own_is_no_dependence(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    CACHE = {}
    CALLS = []
    def table(n):
        if n not in CACHE:
            CACHE[n] = len(n) * 0.5
        CALLS.append(n)
        return CACHE[n]
    class Block(Base):
        def forward(self, x):
            return x + self.l(x) * table('four')
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        module.CACHE.clear()
        module.CALLS.clear()
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["variants"] and not compiled.report.as_dict()["eager"]


def test_a_global_that_the_network_sets_between_its_blocks_is_followed(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    SCALE = 1.0
    class Block(Base):
        def forward(self, x):
            return x + self.l(x) * SCALE
    class Network(Net):
        def forward(self, x):
            global SCALE
            for number, block in enumerate(self.blocks):
                SCALE = 2.0 + 3 * number
                x = block(x)
            return self.out(x)
    """
    module = form(code)
    with graphs_as_they_are():
        torch.manual_seed(0)
        net = module.Network().eval().requires_grad_(False)
        compiled = nexfort_engine.compile(net)
        for _ in range(3):
            assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_a_call_that_looks_like_a_container_s_hides_nothing(form: Callable[[str], types.ModuleType]) -> None:
    module = form(PLAIN.format("torch.add(torch.tanh(self.l(x)), 1)"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        torch.tanh = lambda t: t * 3
        assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_a_branch_that_is_not_taken_imports_nothing(form: Callable[[str], types.ModuleType], tmp_path: Path) -> None:
    (tmp_path / "nexfort_form_untaken.py").write_text("raise RuntimeError('imported')")
    code = """
    ON = False
    class Block(Base):
        def forward(self, x):
            if ON:
                from nexfort_form_untaken import thing
                return thing(x)
            return x + self.l(x)
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["eager"] and "nexfort_form_untaken" not in sys.modules


def test_a_function_that_is_called_in_another_case_is_no_dependence(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    TWICE = False
    def twice(x):
        return x * 2
    class Block(Base):
        def forward(self, x):
            y = self.l(x)
            return x + (twice(y) if TWICE else y)
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        module.twice = lambda t: t * 5
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.as_dict()["variants"]
        module.TWICE = True
        assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_code_that_counts_runs_eager(form: Callable[[str], types.ModuleType]) -> None:
    code = """
    COUNT = 0
    class Block(Base):
        def forward(self, x):
            global COUNT
            COUNT += 1
            return x + self.l(x) * COUNT
    """
    module = form(code)
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        module.COUNT = 0
        _run(compiled)
        module.COUNT = 0
        wanted = _run(net)
        module.COUNT = 0
        assert _distance(_run(compiled), wanted) < TOLERANCE
        assert {"blocks.0", "blocks.1"} <= {row["region"] for row in compiled.report.as_dict()["eager"]}
        assert "it counts in" in compiled.report.as_dict()["eager"][0]["reason"]


BAD = {
    "no function": ("m.helper = 5", TypeError),
    "nothing": ("del m.helper", NameError),
    "a function that raises": ("m.helper = lambda t: t.nothing_of_the_kind", AttributeError),
    "an object whose attributes raise": (
        "m.helper = type('Odd', (), {'__getattr__': lambda s, n: 1 / 0, '__call__': lambda s, t: t * 5})()",
        None,
    ),
    "an object that cannot be compared": (
        "m.helper = type('Odd', (), {'__eq__': lambda s, o: 1 / 0, "
        "'__hash__': None, '__call__': lambda s, t: t * 5})()",
        None,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_put_in_a_function_s_place_fails_as_in_eager(
    name: str, form: Callable[[str], types.ModuleType]
) -> None:
    change, error = BAD[name]
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    with graphs_as_they_are():
        net, own = _net(module), module.helper
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        _change(change, module, net)
        if error is None:
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        else:
            for one in (net, compiled):
                with pytest.raises(error):
                    _run(one)
        module.helper = own
        mark = compiled.report.mark()
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert not compiled.report.since(mark)["eager"], "it has an artefact for this function"


def test_an_emptied_registry_fails_as_in_eager(form: Callable[[str], types.ModuleType]) -> None:
    module = form("STEPS = {'a': lambda x: x * 2}\n" + PLAIN.format("STEPS['a'](self.l(x))"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        _run(compiled)
        step = module.STEPS.pop("a")
        for one in (net, compiled):
            with pytest.raises(KeyError):
                _run(one)
        module.STEPS["a"] = step
        assert _distance(_run(compiled), _run(net)) < TOLERANCE


def test_a_module_loaded_anew_is_another_one(form: Callable[[str], types.ModuleType]) -> None:
    """The block's code goes on with the functions of the old one, whatever is put into the new one."""
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        before = _run(compiled)
        del sys.modules[module.__name__]
        new = importlib.import_module(module.__name__)
        new.helper = lambda t: t * 5
        assert torch.equal(_run(compiled), before) and not compiled.report.as_dict()["variants"]
        module.helper = lambda t: t * 7
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert _distance(_run(net), before) > MOVES


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_a_replaced_name_is_found_by_one_comparison(form: Callable[[str], types.ModuleType]) -> None:
    module = form("def helper(x):\n    return x * 2\n" + PLAIN.format("helper(self.l(x))"))
    net = _net(module)
    with walked() as codes:
        _run(net.blocks[0])
    rows, only_here = rows_of(net.blocks[0], codes)
    assert only_here == ""
    watched = Watched()
    names = Dependence(rows, classes_in(net.blocks[0]), watched)
    watched.look()
    assert names.holds()
    epoch = watched.epoch
    watched.look()
    assert watched.epoch == epoch and names.holds()
    module.helper, own = (lambda t: t * 5), module.helper
    watched.look()
    assert watched.epoch != epoch and not names.holds() and str(names.differs).endswith(".helper")
    module.helper = own
    watched.look()
    assert names.holds()


def test_what_only_this_process_can_compare_is_said(form: Callable[[str], types.ModuleType]) -> None:
    module = form("TABLE = torch.zeros(1 << 17)\n" + PLAIN.format("self.l(x) * (TABLE.numel() - (1 << 17) + 1)"))
    net = _net(module)
    with walked() as codes:
        _run(net.blocks[0])
    assert rows_of(net.blocks[0], codes)[1].endswith(".TABLE.numel")


def test_digests_tell_functions_by_what_they_do() -> None:
    def made(by: float, default: int = 1) -> Any:
        return lambda x, y=default: x * by + y

    assert digest(made(2.0)) == digest(made(2.0))
    assert digest(made(2.0)) != digest(made(3.0)), "cells"
    assert digest(made(2.0)) != digest(made(2.0, 2)), "defaults"
    assert digest(lambda x: x + 1) != digest(lambda x: x + 2), "code"

    def recursive(n: int) -> int:
        return recursive(n - 1) if n else 0

    assert digest(recursive) == digest(recursive)
    assert digest(torch.relu)[1] and digest(torch.relu) != digest(torch.tanh)
    assert digest(functools.partial(torch.add, 1)) != digest(functools.partial(torch.add, 2))
    assert digest(functools.wraps(torch.relu)(lambda x: x)) != digest(functools.wraps(torch.relu)(lambda x: x * 2))


def test_an_address_that_leads_nowhere_is_missing() -> None:
    resolver = Resolver([nn.Linear])
    from nexfort_engine.guards.option_recorder import MISSING

    assert resolver.ends(("no.such.module", (("global", "x"),))) == [MISSING]
    assert resolver.ends(("", (("import", "no_such_module"), ("attr", "x")))) == [MISSING]


def test_an_attribute_that_a_weight_has_is_not_lost(form: Callable[[str], types.ModuleType]) -> None:
    module = form(PLAIN.format("self.l(x) * getattr(self.l.weight, 'gain', 1.0)"))
    with graphs_as_they_are():
        net = _net(module)
        for block in net.blocks:
            block.l.weight.gain = 2.0
        compiled = nexfort_engine.compile(net)
        assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert "attribute gain" in compiled.report.as_dict()["eager"][0]["reason"]


def test_what_each_thread_has_of_its_own_runs_eager(form: Callable[[str], types.ModuleType]) -> None:
    code = "import threading\nstate = threading.local()\nstate.scale = 2.0\n"
    module = form(code + PLAIN.format("self.l(x) * getattr(state, 'scale', 1.0)"))
    with graphs_as_they_are():
        net = _net(module)
        compiled = nexfort_engine.compile(net)
        for scale in (2.0, 5.0):
            module.state.scale = scale
            assert _distance(_run(compiled), _run(net)) < TOLERANCE
        assert "threading.local" in compiled.report.as_dict()["eager"][0]["reason"]
