# SPDX-License-Identifier: Apache-2.0
"""The words of a config and how text is read: modes, options, JSON. On errors the nearest valid word is named."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .option_catalogue import LEGACY_NO_EFFECT, OPTION_ROWS, RETIRED

TOKENS: dict[str, str] = {
    "O2": "default: fused kernels at the model's own precision, no search, any size",
    "O3": "O2 plus low-precision",
    "max-autotune": "search for the fastest kernels; compiles longer",
    "max-optimize": "all fusions; with max-autotune also the finest search",
    "cudagraphs": "replay whole steps as CUDA graphs",
    "freezing": "fold weights ahead and keep the results while the weights stay",
    "low-precision": "allow cheaper arithmetic",
    "cache-all": "keep everything compiled on disk (always on)",
    "benchmark": "let cuDNN measure its convolution algorithms",
    "jit": "fast-compile profile: least compile time, less speed",
    "disable-runtime-fusion": "fast-compile profile, as jit",
    "quant": "weights that quantize_pipe packed; nothing else is needed for them",
}
DEFAULT_MODE = "O2"

OPTIONS: tuple[str, ...] = (*OPTION_ROWS, *LEGACY_NO_EFFECT, *RETIRED)  # each is true or false
KEYS = ("mode", "options", "memory_format", "dynamic", "fullgraph", "disable")
MEMORY_FORMATS = ("channels_last", "contiguous_format", "preserve_format")

EXAMPLE = '{"mode": "O2", "memory_format": "channels_last", "dynamic": true}'

# Words of torch.compile and of habit that are not near their equivalent by spelling.
_SYNONYMS = {
    "default": "O2",
    "reduce-overhead": "cudagraphs",
    "max-autotune-no-cudagraphs": "max-autotune",
    "cuda-graphs": "cudagraphs",
    "fp8": "quant",
    "int8": "quant",
    "nhwc": "channels_last",
    "nchw": "contiguous_format",
}


def as_mapping(options: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What was given by key: a mapping as it is, JSON text read, a bare mode as {"mode": ...}, nothing as {}."""
    if options is None:
        return {}
    if isinstance(options, Mapping):
        return options
    if not isinstance(options, str):
        raise ValueError(
            f"options is a {type(options).__name__}; expected a dict, JSON text or a mode, for example {EXAMPLE}"
        )
    text = options.strip()
    if not text:
        return {}
    if text != "null" and not re.search(r'[{}\[\]"]', text):
        return {"mode": text}
    loaded = _load_json(text)
    if loaded is None:
        return {}
    if isinstance(loaded, str):
        return {"mode": loaded}
    if not isinstance(loaded, dict):
        raise ValueError(f"options is a JSON {type(loaded).__name__}; expected an object, for example {EXAMPLE}")
    return loaded


def _load_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        hint = "; JSON wants double quotes" if "'" in text and '"' not in text else ""
        near = text[max(0, error.pos - 12) : error.pos + 12]
        raise ValueError(
            f"options is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}, "
            f"near {near!r}{hint}; expected for example {EXAMPLE}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"options is nested too deeply for JSON; expected for example {EXAMPLE}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"options has the key {key!r} twice; expected each key once, so remove one of them")
        found[key] = value
    return found


def tokens_of(mode: object) -> tuple[str, ...]:
    """The words of a mode such as "O3:benchmark", in its order."""
    if not isinstance(mode, str):
        raise ValueError(
            f"mode is a {type(mode).__name__}; expected text of tokens joined by ':', for example "
            f"'max-optimize:max-autotune'. All tokens: {', '.join(TOKENS)}"
        )
    return tuple(token.strip() for token in mode.split(":") if token.strip())


def pairs_of(options: object) -> tuple[tuple[str, object], ...]:
    """Low-level options that are given, as pairs."""
    if not isinstance(options, Mapping):
        raise ValueError(
            f'"options" is a {type(options).__name__}; expected an object such as '
            f'{{"overrides.conv_benchmark": true}}. All options: {", ".join(OPTIONS)}'
        )
    for name in options:
        if name in KEYS:
            raise ValueError(
                f'{name!r} stands inside "options"; expected one level up, beside "mode", for example {EXAMPLE}'
            )
    return tuple((name, value) for name, value in options.items() if value is not None)


def check_key(key: object) -> None:
    """Raise ValueError unless `key` is one beside "mode"."""
    if isinstance(key, str) and key in OPTIONS:
        raise ValueError(
            f'{key!r} is a low-level option; expected inside "options": {{"options": {{"{key}": true}}}}. '
            f"All keys here: {', '.join(KEYS)}"
        )
    check_name(key, KEYS, "key")


def check_bool(value: object, what: str) -> None:
    """Raise ValueError, naming `what`, unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, a {type(value).__name__}; expected true or false")


def check_name(name: object, valid: Iterable[str], what: str) -> None:
    """Raise ValueError, with the nearest valid word and all of them, unless `name` is one."""
    words = tuple(valid)
    if isinstance(name, str) and name in words:
        return
    raise ValueError(f"unknown {what} {name!r}; did you mean {_nearest(str(name), words)!r}? Valid: {', '.join(words)}")


def _nearest(name: str, words: tuple[str, ...]) -> str:
    """The valid word nearest to `name`: by habit first, then by spelling regardless of case, '_' and '-'."""
    plain = name.strip().lower()
    synonym = _SYNONYMS.get(plain.replace("_", "-"), "")
    if synonym in words:
        return synonym
    folded = {word.lower().replace("_", "-"): word for word in words}
    best = difflib.get_close_matches(plain.replace("_", "-"), list(folded), n=1, cutoff=0.0)
    return folded[best[0]]
