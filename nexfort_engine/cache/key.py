# SPDX-License-Identifier: Apache-2.0
"""The primary key of an artefact: a pure function of what shapes compiled code; and this machine's facts.

`primary_key` hashes any tree of plain values into a short text. It depends on the values alone: not on the
order of a mapping, on paths, on time or on the process. `environment_parts` collects what is the same for
every artefact of a process and a device. Nothing here touches the disk cache; storage lives in `store.py`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Set
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from ..system.cuda_driver import driver_version

KEY_LENGTH = 32
# Every distribution name under which a Triton can be installed; its version is read without importing it.
TRITON_NAMES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
# Files and folders of the engine that shape no compiled code, each with the reason. Everything else counts as shaping
# artefacts, so that a new file is safe by default: forgetting to name it here costs a recompilation, never a stale
# artefact. A folder ends with a slash.
NOT_SHAPING: Mapping[str, str] = {
    "__init__.py": "hands out the public names",
    "__main__.py": "starts the command line",
    "backend.py": "an older name of a file that moved",
    "build.py": "an older name of a file that moved",
    "cache/": "stores artefacts; what an entry holds is checked when it is read",
    "clear_cache.py": "starts a command",
    "cli/": "commands",
    "compilation/handover.py": "says which steps run what was made",
    "compilation/load_ahead.py": "loads what was made",
    "compilation/rank_turns.py": "says which of several processes makes an artefact",
    "compilation/selfcheck.py": "asks whether a device can compile at all",
    "compiled.py": "an older name of a file that moved",
    "cudagraphs/backoff.py": "decides which steps are observed",
    "cudagraphs/capture_check.py": "tries whether a step can be a CUDA graph",
    "cudagraphs/graph_capture.py": "captures what was lowered",
    "cudagraphs/few_steps.py": "decides in which picture steps are captured",
    "cudagraphs/host_constants.py": "replays what calls copied from the host, once they are CUDA graphs",
    "cudagraphs/module_fingerprint.py": "compares what lies between regions before a CUDA graph is replayed",
    "cudagraphs/step_graphs.py": "captures and replays what was lowered",
    "dispatch/compiled_share.py": "steps aside where little of a network is compiled",
    "dispatch/first_result.py": "compares results with those of eager code",
    "dispatch/slowdown.py": "compares times of steps",
    "dispatch/speed.py": "compares times of steps",
    "dispatch/step_times.py": "compares times of steps",
    "dispatch/verify.py": "compares pictures with those of eager code",
    "flags.py": "an older name of a file that moved",
    "hosts/": "tells the engine of a host's networks; what of them shapes code is in the rest of the key",
    "lowering/async_compile_pool.py": "ends torch's compiler processes that hang",
    "lowering/worker_connection.py": "waits for a worker's answer",
    "lowering/worker_lifetime.py": "ends a worker whose process is gone",
    "lowering/worker_main.py": "starts a worker",
    "offload.py": "an older name of a file that moved",
    "reporting/": "tells what was done",
    "system/capture_stream.py": "lends streams to run on",
    "system/compiler_processes.py": "ends compilers that hang",
    "system/compiler_reaper.py": "ends compilers whose process is gone",
    "system/cuda_driver.py": "asks for the driver's version",
    "system/cuda_graph_pool.py": "gives back memory of CUDA graphs",
    "system/live_objects.py": "lists engines and threads",
    "system/process_activity.py": "reads what processes do",
    "system/random_state.py": "keeps the order of random numbers",
    "system/torch_private.py": "lists the private names of torch that the engine uses",
    "system/yielding.py": "lets steps go first",
    "weights/residency.py": "decides what stays on a device",
}
_TORCH_SCALARS = ("dtype", "memory_format", "layout", "device", "qscheme")


def primary_key(parts: Mapping[str, object]) -> str:
    """The key of `parts`: the first 32 hex digits of the SHA-256 of its canonical JSON.

    Values may be None, bool, int, float, str, bytes, torch dtypes and their like, and lists, tuples, sets and
    mappings of these. Anything else is a TypeError: an object that prints its address would make a key that
    never hits.
    """
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:KEY_LENGTH]


def canonical_json(value: object) -> str:
    """JSON with the same text for two values exactly if they are the same (a list is as good as a tuple)."""
    try:
        return _dump(_canonical(value))
    except _Unfit:
        raise TypeError(_unfit(value, "parts")) from None


# one for all: `json.dumps` makes another for each call with options
_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode
_PLAIN = (str, int, bool, type(None))  # as they are; most of a block's structure


class _Unfit(Exception):
    """Something that cannot be in a key. Which and where is found out afterwards: it hardly ever happens."""


def _canonical(value: object) -> Any:
    """`value` as JSON; mappings and special types are tagged, so that no plain value can imitate them."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return list(map(_canonical, value))
    if isinstance(value, Mapping):
        pairs = [[_canonical(k), _canonical(v)] for k, v in value.items()]
        return {"$map": sorted(pairs, key=lambda pair: _dump(pair[0]))}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, Set):
        return {"$set": sorted(map(_canonical, value), key=_dump)}
    if kind.__module__ == "torch" and kind.__name__ in _TORCH_SCALARS:
        return {"$torch": str(value)}
    raise _Unfit


def _unfit(value: object, where: str) -> str:
    """What the first part of a value is that cannot be in a key, and what to do; "" if there is none."""
    parts: list[tuple[object, str]] = []
    if isinstance(value, (list, tuple)):
        parts = [(one, f"{where}[{i}]") for i, one in enumerate(value)]
    elif isinstance(value, Mapping):
        parts = [pair for k, v in value.items() for pair in ((k, f"a key of {where}"), (v, f"{where}[{k!r}]"))]
    elif isinstance(value, Set):
        parts = [(one, f"an element of {where}") for one in value]
    else:
        try:
            _canonical(value)
        except _Unfit:
            if isinstance(value, PurePath):
                return f"{where} is a path; a key must not depend on where files lie: use a hash of the content"
            kind = type(value)
            return (
                f"{where} is a {kind.__module__}.{kind.__qualname__}; a key takes plain scalars, bytes, torch dtypes "
                "and lists, sets and mappings of these: turn it into one of them"
            )
    return next(filter(None, (_unfit(one, place) for one, place in parts)), "")


def environment_parts(device_type: str) -> dict[str, object]:
    """What every artefact for `device_type` ("cpu", "cuda:1") depends on, collected once a process."""
    return dict(_environment_parts(_with_index(device_type)))


@functools.cache
def _environment_parts(device: str) -> Mapping[str, object]:
    import torch

    return {
        "engine": engine_source_hash(),
        "torch": [str(torch.__version__), torch.version.git_version, torch.version.cuda, torch.version.hip],
        "triton": triton_versions(),
        # The pickles inside an artefact and the tags of its extension modules follow the minor version.
        "python": [platform.python_implementation(), *sys.version_info[:2]],
        "platform": [platform.system(), platform.machine()],
        "device": device_facts(device),
    }


def fingerprint(device_type: str) -> str:
    """A short text that two machines share exactly if one may use the artefacts of the other on such a device."""
    return primary_key(environment_parts(device_type))


def fingerprints() -> dict[str, str]:
    """Fingerprint -> readable device, for every device that torch sees on this machine."""
    import torch

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        devices += [f"xpu:{i}" for i in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {fingerprint(device): str(machine(device)["device"]) for device in devices}


def machine(device_type: str) -> dict[str, str]:
    """What `fingerprint` hashes, for people: engine, torch, triton, python, platform and device."""
    parts: Any = environment_parts(device_type)
    facts = parts["device"]
    readable = {
        "cuda": lambda: f"{facts[1]} ({'.'.join(map(str, facts[2]))})",
        "cpu": lambda: f"{facts[1]} (features {facts[2]})",
    }.get(facts[0], lambda: " ".join(map(str, facts)))
    implementation, *version = parts["python"]
    return {
        "engine": parts["engine"][:16],
        "torch": parts["torch"][0],
        "triton": ", ".join(f"{name} {version}" for name, version in parts["triton"].items()) or "none",
        "python": f"{implementation} {'.'.join(map(str, version))}",
        "platform": " ".join(parts["platform"]),
        "device": readable(),
    }


def driver_needed(device_type: str) -> int | None:
    """The oldest driver, as CUDA writes versions (13000 is 13.0), that runs code compiled here; None without CUDA.

    Code for one card runs on every driver from the first of the same major version of CUDA on ("minor version
    compatibility", CUDA Compatibility guide).
    """
    import torch

    if device_type.partition(":")[0] != "cuda" or torch.version.cuda is None:
        return None
    return int(torch.version.cuda.partition(".")[0]) * 1000


def driver_problem(needed: int | None) -> str | None:
    """Why this machine's driver does not run code that needs such a driver; None also where that can't be told."""
    if needed is None:
        return None
    found = driver_version()
    if found is None or found >= needed:
        return None
    return f"it needs a driver for CUDA {_cuda_version(needed)}, found one for CUDA {_cuda_version(found)}"


def _cuda_version(number: int) -> str:
    """13000 is 13.0, 12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _with_index(device_type: str) -> str:
    """`cuda` names whichever card is current, which may change in the process: pin it before it is cached."""
    if device_type != "cuda":
        return device_type
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else device_type


def device_facts(device: str) -> list[object]:
    """Name and abilities of one device, as far as compiled code depends on them."""
    import torch

    kind = device.partition(":")[0]
    if kind == "cpu":
        return ["cpu", *cpu_facts(), os.environ.get("ATEN_CPU_CAPABILITY", "")]  # torch's limit to some instructions
    if kind == "cuda":
        index = torch.device(device).index or 0
        properties = torch.cuda.get_device_properties(index)
        capability = list(torch.cuda.get_device_capability(index))
        return [
            "cuda",
            torch.cuda.get_device_name(index),
            capability,
            getattr(properties, "gcnArchName", None),
        ]
    if kind == "xpu":
        return ["xpu", torch.xpu.get_device_name(torch.device(device))]
    # Metal has one device and its code follows the system's version.
    return [kind, platform.processor(), platform.mac_ver()[0], platform.release()]


@functools.cache
def cpu_facts(cpuinfo: str = "/proc/cpuinfo") -> tuple[str, str]:
    """(model name, hash of the instruction set flags) of this CPU; without /proc what `platform` knows."""
    try:
        text = Path(cpuinfo).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or a sandbox without /proc
        text = ""
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    model = fields.get("model name") or " ".join(
        fields[name] for name in ("cpu implementer", "cpu part", "cpu variant") if name in fields
    )
    flags = fields.get("flags") or fields.get("features") or ""
    model = model or platform.processor() or platform.machine()
    return model, hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]


def triton_versions() -> dict[str, str]:
    """Installed Triton distributions and their versions, without importing any."""
    found = {}
    for name in TRITON_NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def engine_source_hash(root: Path | None = None) -> str:
    """SHA-256 over the engine's source files that shape artefacts, by content, wherever they lie."""
    package = root or Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for name, path in shaping_files(package):
        # Line ends differ between checkouts of one commit; the code does not.
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def shaping_files(package: Path) -> list[tuple[str, Path]]:
    """(name within the package, file) of every source file that shapes artefacts, in a fixed order."""
    found = []
    for folder, folders, files in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(package).as_posix()
            if file.endswith(".py") and not _never_shapes(name):
                found.append((name, path))
    return sorted(found)


def _never_shapes(name: str) -> bool:
    """Whether a file, or one of the folders that it lies in, is named in NOT_SHAPING."""
    folders = [f"{parent.as_posix()}/" for parent in PurePosixPath(name).parents]
    return not NOT_SHAPING.keys().isdisjoint((name, *folders))


def package_version(name: str) -> str:
    """The version of an installed or loaded package, without importing it; "none" if there is none."""
    package = __name__.partition(".")[0] if name == "nexfort" else name
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(loaded, str):
        return str(loaded)
    if name == "triton":
        return next(iter(triton_versions().values()), "none")
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
