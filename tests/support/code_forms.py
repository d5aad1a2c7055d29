# SPDX-License-Identifier: Apache-2.0
"""Forms in which code reaches values by name: globals, registries, closures, modules passed on. No test lives here."""

from __future__ import annotations

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
NAMES = {
    "a function of torch through a module": (PLAIN.format("F.gelu(self.l(x))"), "F.gelu = lambda t: torch.relu(t) * 3"),
    "a function of torch by its own name": (PLAIN.format("silu(self.l(x))"), "m.silu = lambda t: torch.relu(t) * 3"),
    "an operator of torch": (PLAIN.format("torch.tanh(self.l(x))"), "torch.tanh = lambda t: t * 3"),
    "what a function of torch calls": (
        PLAIN.format("F.layer_norm(self.l(x), (8,))"),
        "torch.layer_norm = lambda t, *a: t * 3",
    ),
    "a static method of a helper": (
        "class Helper:\n    @staticmethod\n    def scale(x):\n        return x * 2\n"
        + PLAIN.format("Helper.scale(self.l(x))"),
        "m.Helper.scale = staticmethod(lambda t: t * 5)",
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
    "a bound method by name": (
        "class Helper:\n    by = 2.0\n    def scale(self, x):\n        return x * self.by\n"
        "helper = Helper().scale\n" + PLAIN.format("helper(self.l(x))"),
        "m.Helper.by = 5.0",
    ),
    "a function in a registry": (
        "REGISTRY = {'half': lambda x: x * 2}\n" + PLAIN.format("REGISTRY['half'](self.l(x))"),
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
    "a view of a dict": (
        "import types\nHELD = {'scale': 2.0}\nVIEW = types.MappingProxyType(HELD)\n"
        + PLAIN.format("self.l(x) * VIEW['scale']"),
        "m.HELD['scale'] = 5.0",
    ),
    "a dict in a chain of dicts": (
        "import collections\nHELD = {'scale': 2.0}\nCHAIN = collections.ChainMap({}, HELD)\n"
        + PLAIN.format("self.l(x) * CHAIN['scale']"),
        "m.HELD['scale'] = 5.0",
    ),
    "bytes that change": ("HELD = bytearray(b'2')\n" + PLAIN.format("self.l(x) * HELD[0]"), "m.HELD[0] = 99"),
    "an array of Python's": (
        "import array\nHELD = array.array('d', [2.0])\n" + PLAIN.format("self.l(x) * HELD[0]"),
        "m.HELD[0] = 5.0",
    ),
    "what a weak reference leads to": (
        "import weakref\nclass Held:\n    scale = 2.0\nHELD = Held()\nHELD.scale = 2.0\nREF = weakref.ref(HELD)\n"
        + PLAIN.format("self.l(x) * REF().scale"),
        "m.HELD.scale = 5.0",
    ),
    "a variable of the environment": (
        PLAIN.format("(self.l(x) * 5 if os.environ.get('NEXFORT_TEST_FORM') else self.l(x))"),
        "os.environ['NEXFORT_TEST_FORM'] = '1'",
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
    "a module by its name": (
        "import importlib\n" + PLAIN.format("importlib.import_module('torch.nn.functional').softplus(self.l(x))"),
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a global by its name": (
        "SCALE = 2.0\n" + PLAIN.format("self.l(x) * globals()['SCALE']"),
        "m.SCALE = 5.0",
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
    "a number of equal value and another type": (
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n        self.n = 2\n"
        "    def forward(self, x):\n        return x + self.l(x) * (5.0 if isinstance(self.n, float) else 2.0)\n",
        "[setattr(b, 'n', 2.0) for b in net.blocks]",
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
