# SPDX-License-Identifier: Apache-2.0
"""Makes the project's .venv and installs what `make test` or `make demo` needs: `python3 tools/make_venv.py test`.

Runs before anything is installed, so it needs nothing but Python. Packages come from whatever index pip is set up for,
held to constraints.txt. If this machine has a ComfyUI, its own requirements are installed too; it is never changed.
A second call with the same requirements does nothing. `--torch VERSION` makes an environment with that torch instead,
`.venv/torch-VERSION`. `--front-end VERSION` puts another version of ComfyUI's front end beside the environment's own,
into its `front-ends/VERSION`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
REQUIREMENTS = {
    "test": ROOT / "requirements-test.txt",
    "demo": ROOT / "demo" / "requirements.txt",
    "lint": ROOT / "tools" / "requirements-lint.txt",
}
FRONT_END = "comfyui-frontend-package"
OF_TORCH = ("torch", "torchvision", "torchaudio")  # the rows of constraints.txt that another torch does without
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.10", "python3", "python")
OLDEST = (3, 10)
# A Python without its headers cannot build what Inductor writes for a CPU, so one that has them is preferred.
_PROBE = """
import ensurepip, os, sys, sysconfig, venv
headers = os.path.join(sysconfig.get_path("include"), "Python.h")
print(sys.executable, sys.version_info >= (3, 10), os.path.exists(headers))
"""


class SetupError(Exception):
    """Something that the reader has to set right. The text says what was found, what was expected and what to do."""


def find_python(names: Sequence[str] = PYTHONS) -> str:
    """The first Python that can make the environment, those with headers first. `PYTHON` in the environment wins."""
    chosen = os.environ.get("PYTHON")
    usable = [found for name in ([chosen] if chosen else names) if (found := _probe(name)) is not None]
    if not usable:
        tried = chosen or ", ".join(names)
        raise SetupError(
            f"found no Python that can make a virtual environment (tried {tried}); expected Python "
            f"{OLDEST[0]}.{OLDEST[1]} or newer with its venv module: install one (on Debian and Ubuntu python3, "
            "python3-venv and python3-dev), or name one in the variable PYTHON"
        )
    with_headers = [path for path, headers in usable if headers]
    if not with_headers:
        _say(f"{usable[0][0]} has no Python.h, which compiling on a CPU needs: install its headers (python3-dev)")
    return (with_headers or [usable[0][0]])[0]


def _probe(name: str) -> tuple[str, bool] | None:
    """(executable, whether its headers are there) of a usable Python, or None."""
    path = shutil.which(name)
    if path is None:
        return None
    # Being on the path is not enough: version managers leave names there that only print a message.
    done = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
    words = done.stdout.strip().rsplit(" ", 2)
    if done.returncode != 0 or len(words) != 3 or words[1] != "True":
        return None
    return words[0], words[2] == "True"


def python_of(venv: Path) -> Path:
    """The Python inside a virtual environment."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure_venv(venv: Path) -> Path:
    """Makes the environment, or makes it anew if its Python no longer runs; returns its Python."""
    python = python_of(venv)
    if python.exists() and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
        return python
    base = find_python()
    _say(f"making {venv} with {base}")
    _run([base, "-m", "venv", "--clear", str(venv)], "making the virtual environment failed")
    return python


def install(venv: Path, purpose: str, torch: str | None = None) -> None:
    """Installs the requirements of `purpose`, and those of a ComfyUI, unless that was done already.

    torch: a version to take instead of the one in constraints.txt, with the torchvision and torchaudio that pip finds
    to fit it.
    """
    python = ensure_venv(venv)
    comfyui = _comfyui_requirements()
    files = [REQUIREMENTS[purpose]] if comfyui is None or purpose == "lint" else [REQUIREMENTS[purpose], comfyui]
    stamp = venv / f"nexfort-{purpose}.json"
    constraints = CONSTRAINTS if torch is None else _constraints_with(torch, venv)
    wanted = _fingerprint([*files, *REQUIREMENTS.values(), constraints])
    if _read(stamp) == wanted:
        return
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet"]
    for file in files:
        _say(f"installing {file} (the first time takes a few minutes)")
        _run(
            [*command, "--constraint", str(constraints), "--requirement", str(file)],
            f"installing {file} failed; pip says why above. Set right what it says and run the same command again",
        )
    if torch is not None:
        _make_torchaudio_import(python)
    stamp.write_text(json.dumps(wanted, indent=1), encoding="utf-8")


def _constraints_with(torch: str, venv: Path) -> Path:
    """The rows of constraints.txt with another torch, as a file in the environment."""
    rows = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    kept = [row for row in rows if not row.startswith("#") and row.partition("==")[0] not in OF_TORCH]
    file = venv / "constraints.txt"
    file.write_text("\n".join([f"torch=={torch}", *kept, ""]), encoding="utf-8")
    return file


def _make_torchaudio_import(python: Path) -> None:
    """Leaves out torchaudio's compiled part where it was built for another CUDA than torch.

    torchaudio 2.11, the newest, refuses to be imported there, and ComfyUI does not start without it. What is written in
    Python does without the compiled part.
    """
    done = subprocess.run([python, "-c", "import torchaudio"], capture_output=True, text=True, check=False)
    if done.returncode == 0 or "different CUDA versions" not in done.stderr:
        return
    find = "import importlib.util; print(importlib.util.find_spec('torchaudio').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    for file in Path(found.stdout.strip(), "lib").glob("_torchaudio.*"):
        _say(f"leaving out {file}: torchaudio was built for another CUDA than torch")
        file.unlink()


def install_front_end(venv: Path, version: str) -> Path:
    """Puts a version of ComfyUI's front end into a folder of its own, unless it is there; returns the folder."""
    folder = venv / "front-ends" / version
    if (folder / FRONT_END.replace("-", "_") / "static").is_dir():
        return folder
    _say(f"installing {FRONT_END} {version} into {folder}")
    command = [str(python_of(venv)), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--quiet"]
    _run(
        [*command, "--no-deps", "--target", str(folder), f"{FRONT_END}=={version}"],
        f"installing {FRONT_END} {version} failed; pip says why above. Choose a version that your index has",
    )
    return folder


def _comfyui_requirements() -> Path | None:
    """The requirements of the ComfyUI that the project finds on this machine."""
    sys.path.insert(0, str(ROOT))
    from nexfort_engine.hosts.comfy_install import ComfyError, find_comfyui

    try:
        found = find_comfyui()
    except ComfyError as error:
        raise SetupError(str(error)) from None
    if found is None:
        return None
    file = found[0] / "requirements.txt"
    return file if file.is_file() else None


def _fingerprint(files: Sequence[Path]) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _read(stamp: Path) -> object:
    try:
        return json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never installed, or interrupted while it was written
        return None


def _run(command: list[str], failure: str) -> None:
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise SetupError(failure)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 if everything is there, 1 with one sentence otherwise."""
    parser = argparse.ArgumentParser(description="Make the virtual environment of this project.")
    parser.add_argument("purpose", choices=sorted(REQUIREMENTS))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", metavar="VERSION", help="make an environment with this torch, inside the usual one")
    parser.add_argument("--front-end", metavar="VERSION", help="a version of ComfyUI's front end to put beside")
    options = parser.parse_args(arguments)
    venv = options.venv.absolute()
    if options.torch:
        venv /= f"torch-{options.torch}"
    try:
        install(venv, options.purpose, options.torch or None)
        if options.front_end:
            install_front_end(venv, options.front_end)
    except SetupError as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
