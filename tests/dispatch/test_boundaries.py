# SPDX-License-Identifier: Apache-2.0
"""Hooks and replaced forwards are boundaries: what lies around them runs compiled, and they run as in eager.

Each test asserts first that the hook moves what eager gives. Captured graphs run as they are here (subjects.py), which
leaves out Inductor and nothing else.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from large_rows import few

torch = pytest.importorskip("torch")
import net_pairs  # noqa: E402
from net_pairs import Net, Pair, x  # noqa: E402
from torch import nn  # noqa: E402

T = torch.Tensor
unlowered, pair = net_pairs.unlowered, net_pairs.pair  # fixtures


def wrapped(module: nn.Module) -> None:
    """As most packs do it: the module's own forward lies in a closure."""
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) * 2  # type: ignore[method-assign]


def replaced_as_diffusers_does(module: nn.Module) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    class Doubles(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 0.5, *args[1:]), kwargs

        def post_forward(self, module: nn.Module, output: T) -> T:
            return output * 2

    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Doubles(), "doubles")
    registry.register_hook(Doubles(), "again")


def hooked_as_accelerate_does(module: nn.Module) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubles(hooks.ModelHook):  # type: ignore[name-defined,misc]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 0.5, *args[1:]), kwargs

        def post_forward(self, module: nn.Module, output: T) -> T:
            return output * 2

    hooks.add_hook_to_module(module, Doubles())


def bound(module: nn.Module) -> None:
    """As ComfyUI's bypass of LoRAs: a method of an object that holds the module's own forward."""

    class Beside:
        def __init__(self) -> None:
            self.original_forward = module.forward

        def forward(self, *args: Any, **kwargs: Any) -> T:
            return self.original_forward(*args, **kwargs) + 1

    module.forward = Beside().forward  # type: ignore[method-assign]


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "a pre-hook with other arguments": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:])),
    "a pre-hook by keywords": lambda m: m.register_forward_pre_hook(
        lambda _, args, words: ((args[0].pow(2), *args[1:]), words), with_kwargs=True
    ),
    "a hook with another result": lambda m: m.register_forward_hook(lambda _, args, result: result * args[0].std()),
    "a forward around it": wrapped,
    "diffusers' hooks": replaced_as_diffusers_does,
    "accelerate's hook": hooked_as_accelerate_does,
    "a method of an object": bound,
}
PLACES = ("blocks.0", "blocks.0.linear", "blocks.1.norm", "head")
places = pytest.mark.parametrize("path", PLACES)


@pytest.mark.parametrize("path", few(PLACES, ("blocks.0", "blocks.0.linear")))
@pytest.mark.parametrize("put_on", HOOKS.values(), ids=HOOKS)
def test_what_lies_around_a_hook_runs_compiled(pair: Pair, put_on: Callable[[nn.Module], Any], path: str) -> None:
    with torch.no_grad():
        before = pair.net(x())
        put_on(pair.net.get_submodule(path))
        assert not torch.allclose(pair.net(x()), before)
    new = pair.agrees(x())
    assert not new["eager"], pair.reasons()
    # what stands around a block is outside of its artefact; a block around what carries a hook has another one
    assert [row["region"] for row in new["artefacts"]] == ([path.rpartition(".")[0]] if path.count(".") > 1 else [])
    new = pair.agrees(x(3, 9))
    assert not new["eager"] and not new["artefacts"]


@places
def test_a_hook_that_goes_leaves_the_artefacts_from_before(pair: Pair, path: str) -> None:
    for time in range(3):
        handle = pair.net.get_submodule(path).register_forward_hook(lambda m, args, out: out * 2)
        new = pair.agrees(x())
        assert not new["eager"] and (not new["artefacts"] or not time)
        handle.remove()
        new = pair.agrees(x())
        assert not new["eager"] and not new["artefacts"]


def test_a_hook_that_changes_between_steps_is_the_one_that_runs(pair: Pair) -> None:
    results = []
    for factor in (2.0, 3.0, 4.0):
        handle = pair.net.blocks[0].linear.register_forward_hook(lambda m, args, out, by=factor: out * by)
        assert not pair.agrees(x())["eager"]
        results.append(pair.compiled(x()))
        handle.remove()
    assert not torch.allclose(results[0], results[1]) and not torch.allclose(results[1], results[2])


def test_hooks_run_once_a_call_and_in_the_order_of_eager(pair: Pair) -> None:
    seen: list[str] = []
    for path, module in pair.net.named_modules():
        if path:
            module.register_forward_pre_hook(lambda m, args, at=path: seen.append(f"to {at}"))
            module.register_forward_hook(lambda m, args, out, at=path: seen.append(f"from {at}"))
    with torch.no_grad():
        pair.net(x())
        wanted, seen[:] = list(seen), []
        for _ in range(2):
            pair.compiled(x())
            assert seen == wanted and len(seen) > 10
            seen.clear()
    assert not pair.reasons()


def test_a_hook_may_keep_what_it_sees(pair: Pair) -> None:
    kept: list[T] = []
    pair.net.blocks[0].linear.register_forward_hook(lambda m, args, out: kept.extend((args[0], out)))
    with torch.no_grad():
        pair.net(x())
        pair.compiled(x())
        assert not pair.reasons() and len(kept) == 4
        pair.compiled(x(seed=5))
    for wanted, found in zip(kept[:2], kept[2:4], strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_what_comes_back_in_another_shape_makes_its_block_eager_and_says_so(pair: Pair) -> None:
    pair.net.blocks[0].linear.register_forward_hook(lambda m, args, out: out[:, :1])
    assert [row["region"] for row in pair.agrees(x())["eager"]] == ["blocks.0"]
    assert "linear, which carries code of others, gives back" in pair.reasons()
    pair.agrees(x(3, 9))


def test_what_changes_its_arguments_in_place_makes_its_block_eager(pair: Pair) -> None:
    handle = pair.net.blocks[0].linear.register_forward_pre_hook(lambda m, args: args[0].mul_(2))
    assert not pair.agrees(x())["eager"], "nobody reads it afterwards"
    handle.remove()
    pair.net.blocks[0].norm.register_forward_pre_hook(lambda m, args: args[0].mul_(2))
    assert [row["region"] for row in pair.agrees(x())["eager"]] == ["blocks.0"]
    assert "changes a tensor that the block may use afterwards" in pair.reasons()


def test_a_hook_that_raises_raises_as_in_eager(pair: Pair) -> None:
    def fails(module: nn.Module, args: Any) -> None:
        raise KeyError("of the hook")

    handle = pair.net.blocks[0].linear.register_forward_pre_hook(fails)
    for _ in range(2):
        with pytest.raises(KeyError, match="of the hook"):
            pair.compiled(x())
    handle.remove()
    new = pair.agrees(x())
    assert not new["eager"] and not new["artefacts"]


def test_weights_that_a_hook_brings_are_those_of_the_call(pair: Pair) -> None:
    """As offloading does: between calls the weight is elsewhere, and its hook takes it back."""
    linear = pair.net.blocks[0].linear
    own = {name: weight.data for name, weight in linear.named_parameters()}
    away = {name: nn.Parameter(value.to("meta"), requires_grad=False) for name, value in own.items()}

    def leave(module: nn.Module, *_: Any) -> None:
        module._parameters.update(away)

    def come(module: nn.Module, *_: Any) -> None:
        module._parameters.update({name: nn.Parameter(value, requires_grad=False) for name, value in own.items()})

    linear.register_forward_pre_hook(come)
    linear.register_forward_hook(leave)
    leave(linear)
    assert not pair.agrees(x())["eager"], pair.reasons()
    own["weight"] = own["weight"] * 3
    assert not pair.agrees(x())["eager"] and not pair.agrees(x(3, 9))["artefacts"]


class TwoResults(nn.Module):
    """A block around a layer that gives two tensors, one of half the length."""

    class Splits(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, h: T, *, scale: float = 1.0) -> tuple[T, T, None]:
            h = self.linear(h) * scale
            return h, h[:, ::2].clone(), None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.splits, self.norm = self.Splits(width), nn.LayerNorm(width)

    def forward(self, h: T) -> T:
        whole, half, nothing = self.splits(self.norm(h), scale=0.5)
        assert nothing is None
        return h + whole * half.mean(1, keepdim=True) + half.shape[1]


def test_several_results_of_other_sizes_come_back(tmp_path: Path) -> None:
    pair = Pair(Net(part=TwoResults), tmp_path)
    with torch.no_grad():
        before = pair.net(x())
        pair.net.blocks[1].splits.register_forward_hook(lambda m, args, out: (out[0] * 3, *out[1:]))
        assert not torch.allclose(pair.net(x()), before)
    for args in (x(), x(3, 9), x(1, 7)):
        pair.agrees(args)
    assert not pair.reasons()


def test_a_forward_that_never_calls_the_modules_own_leaves_what_is_around_it_compiled(pair: Pair) -> None:
    linear = pair.net.blocks[0].linear
    linear.forward = functools.partial(torch.mul, other=2.0)  # type: ignore[method-assign]
    assert not pair.agrees(x())["eager"], pair.reasons()
    block = pair.net.blocks[0]
    block.own = block.forward  # it only keeps it, to put it back
    block.forward = types.MethodType(lambda self, h, *args: h * 2, block)  # type: ignore[method-assign]
    assert [row["region"] for row in pair.agrees(x())["eager"]] == ["blocks.0"]
    assert "which has not called the block's own" in pair.reasons()
    block.forward = block.own  # type: ignore[method-assign]
    pair.net.blocks[1].forward = lambda h, *args: h * 2  # type: ignore[method-assign]
    assert [row["region"] for row in pair.agrees(x())["eager"]] == ["blocks.1"]
    assert "a replaced forward" in pair.reasons()
