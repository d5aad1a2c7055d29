# SPDX-License-Identifier: Apache-2.0
"""Forms in which code reaches what belongs to a block: its attributes, its class, its layers. No test lives here."""

from __future__ import annotations

from code_forms import PLAIN

# form -> (code of the module, the change, given the module `m` and the network `net`)
OF_BLOCKS = {
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
    "a partial": (
        "def scale(by, x):\n    return x * by\nhelper = functools.partial(scale, 2.0)\n"
        + PLAIN.format("helper(self.l(x))"),
        "m.helper = functools.partial(m.scale, 5.0)",
    ),
    "a function in a registry by a name that is an attribute": (
        "REGISTRY = {'half': lambda x: x * 2}\nclass Block(Base):\n    kind = 'half'\n"
        "    def forward(self, x):\n        return x + REGISTRY[self.kind](self.l(x))\n",
        "m.REGISTRY['half'] = lambda t: t * 5",
    ),
    "an attribute of a module that was not there": (
        "import types\nsettings = types.ModuleType('settings')\n"
        + PLAIN.format("self.l(x) * getattr(settings, 'scale', 2.0)"),
        "m.settings = types.SimpleNamespace(scale=5.0)",
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
    "an attribute by a name that is an attribute": (
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n        self.act = 'softplus'\n"
        "    def forward(self, x):\n        return x + getattr(F, self.act)(self.l(x))\n",
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "an attribute by a name in a dict": (
        "KINDS = {3: 'softplus'}\n" + PLAIN.format("getattr(F, KINDS[x.dim()])(self.l(x))"),
        "F.softplus = lambda t: torch.relu(t) * 5",
    ),
    "a method of tensors": (
        PLAIN.format("self.l(x).softmax(-1)"),
        "torch.Tensor.softmax = lambda t, d: torch.softmax(t * 5, d) * 3",
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
    "the order of a dict that is an attribute": (
        "class Block(Base):\n    def __init__(self):\n        super().__init__()\n"
        "        self.d = {'a': True, 'b': False}\n"
        "    def forward(self, x):\n        return x + self.l(x) * (2.0 if next(iter(self.d.values())) else 5.0)\n",
        "[setattr(b, 'd', {'b': False, 'a': True}) for b in net.blocks]",
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
}
