# SPDX-License-Identifier: Apache-2.0
"""The old engine's benchmark of a model as a whole: float32, eager and Nexfort, each in a process of its own.

    python -m benchmarks.old_engine sd21 sdxl pixart latte --csv benchmarks/old_engine.csv

Nexfort begins with an empty cache (its cold warm-up), runs the other sizes, and its warm-up is taken once more in a
second process (its cached one). nexfort-fp8 packs those linear layers in fp8 that pay, and runs no other sizes. Errors
are those of the final latents to the float32 run of the same weights and seed, which --fp32 keeps for other commands.
benchmarks/old_table.py makes the table of published and own figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import append_rows, commit
from benchmarks.unusable import Unusable

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "date gpu torch commit model size steps way config rate inference_s max_used_gib max_reserved_gib warmup_s "
    "warmup_used_gib cached_s compiled cached_compiled sizes_compiled error_to_fp32 error_to_eager psnr ssim packed "
    "command"
).split()
WAYS = ("fp32", "eager", "nexfort", "nexfort-fp8", "compile", "compile-max-autotune")
QUANTIZE = '{"quant_type": "fp8_e4m3_e4m3_dynamic"}'
CONFIG = '{"mode": "O2", "memory_format": "channels_last"}'


@dataclass(frozen=True)
class Family:
    """One model: its name in the tables, the flags its figures were published with, and its other sizes."""

    title: str
    flags: tuple[str, ...]
    script: str = "text_to_image.py"
    sweep: tuple[str, ...] = ("--run_multiple_resolutions", "1", "--run_rare_resolutions", "1")


FAMILIES = {
    "sd21": Family("SD2.1", ("--scheduler", "none", "--steps", "20", "--height", "768", "--width", "768")),
    "sdxl": Family("SDXL", ("--scheduler", "none", "--steps", "20", "--height", "1024", "--width", "1024")),
    # its pipeline would run most of the sizes at the nearest one of a table
    "pixart": Family(
        "PixArt-alpha",
        ("--scheduler", "none", "--steps", "20", "--extra-call-kwargs", '{"use_resolution_binning": false}'),
    ),
    "latte": Family("Latte", ("--steps", "50"), "text_to_video_latte.py", ()),
    "sd3": Family("SD3-medium", ("--scheduler", "none", "--steps", "28")),
    "flux": Family("Flux-dev", ("--scheduler", "none", "--steps", "20")),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help=", ".join(FAMILIES))
    parser.add_argument("--ways", default="fp32,eager,nexfort", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--compiler-config", default=CONFIG, help="options of Nexfort")
    parser.add_argument("--model", default="", help="a folder or a name on the hub instead of random weights")
    parser.add_argument("--tiny", action="store_true", help="models for a CPU, to try the command itself")
    parser.add_argument("--more", default="", help="further flags for each run, as one text")
    parser.add_argument("--no-sweep", action="store_true", help="leave the other sizes out")
    parser.add_argument("--fp32", default="", help="folder that keeps float32 results, and has those of before")
    parser.add_argument("--csv", default="", help="file to append to")
    parser.add_argument("--log", default="", help="folder for the output of each run")
    parser.add_argument("--commit", default="", help="what is measured; default: git's HEAD")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure and append. Exit code 1 where a run failed, 2 for a wrong command."""
    args = parse(argv)
    try:
        check(args)
    except Unusable as error:
        sys.stderr.write(f"old_engine: {error}\n")
        return 2
    failed = False
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(name, args, Path(folder))
        failed |= any(row["inference_s"] == "" for row in rows)
        if args.csv:  # model by model: a run that is stopped keeps what it has
            append_rows(Path(args.csv), rows, COLUMNS)
    return 1 if failed else 0


def check(args: argparse.Namespace) -> None:
    """Raise Unusable for models and ways that there are not."""
    for given, valid, flag in ((args.models, FAMILIES, "the model"), (args.ways.split(","), WAYS, "--ways")):
        for one in given:
            if one not in valid:
                raise Unusable(f"{flag} is {one!r}, expected one of {', '.join(valid)}")
    if args.fp32 and not Path(args.fp32).is_dir():
        raise Unusable(f"--fp32 is {args.fp32}, and there is no such folder; make it first")


# ---- measuring ----------------------------------------------------------------------------------------------


def measure(name: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each way. A run that failed has no figures, and its reason goes to standard error."""
    rows = []
    for way in args.ways.split(","):
        flags = flags_of(name, way, args, folder)
        found = run([sys.executable, str(ROOT / "benchmarks" / FAMILIES[name].script), *flags], way, args, folder)
        rows.append(row(name, way, args, found))
        shown = {key: value for key, value in rows[-1].items() if value != "" and key not in COLUMNS[:5]}
        sys.stdout.write(f"{name} {way}: {json.dumps(shown)}\n")
        sys.stdout.flush()
    return rows


def flags_of(name: str, way: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of one run, without Python and script."""
    family, flags = FAMILIES[name], ["--model", args.model or f"{'tiny' if args.tiny else 'random'}:{name}"]
    own = list(family.flags)
    if args.tiny:
        for flag in ("--height", "--width"):  # those are for full size
            if flag in own:
                del own[own.index(flag) : own.index(flag) + 2]
    flags += own
    ours = way in ("nexfort", "nexfort-fp8")
    flags += ["--compiler", "nexfort" if ours else "none" if way in ("fp32", "eager") else way]
    flags += ["--output-video", str(folder / "out.gif")] if family.script != "text_to_image.py" else []
    truth = truth_of(name, args, folder)
    if way == "fp32":  # the slowest: its warm-up needs no whole picture
        flags += ["--dtype", "float32", "--warmup-steps", "2", "--save-result", str(truth)]
    elif truth.exists():
        flags += ["--reference", str(truth)]
    if ours:
        flags += ["--compiler-config", args.compiler_config, "--cached-warmup"]
    if way == "nexfort" and not args.no_sweep:
        flags += family.sweep
    if way == "nexfort-fp8":
        flags += ["--quantize", "--quantize-config", QUANTIZE]
    return flags + shlex.split(args.more)


def truth_of(name: str, args: argparse.Namespace, folder: Path) -> Path:
    """The file of the float32 result; its name tells apart models and flags, which all make another picture."""
    what = json.dumps([FAMILIES[name].flags, args.model, args.more, args.tiny])
    return Path(args.fp32 or folder) / f"{name}-{zlib.crc32(what.encode()):08x}.pt"


def run(command: list[str], way: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one process that begins with empty caches, or {} if it failed."""
    file = folder / f"{way}.json"
    caches = {name: str(folder / f"{name.lower()}-{way}") for name in ("NEXFORT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    environment = {**os.environ, **caches}
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, env=environment)
    if args.log:
        Path(args.log).mkdir(parents=True, exist_ok=True)
        model = command[command.index("--model") + 1].replace(":", "_").replace("/", "_")
        (Path(args.log) / f"{model}_{way}.log").write_text(done.stdout + done.stderr)
    if done.returncode or not file.exists():
        sys.stderr.write(f"{way} failed with status {done.returncode}:\n{done.stderr[-3000:]}\n")
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


def row(name: str, way: str, args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run as a line of the table."""
    line: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    line.update({key: _short(found[key]) for key in COLUMNS if found.get(key) is not None})
    line.update(model=f"tiny:{name}" if args.tiny else name, way=way)
    line.update(date=datetime.date.today().isoformat(), commit=commit(args.commit))
    if not found:
        return line
    line.update(
        gpu=found["device"], size="x".join(map(str, found["size"])), rate=_short(found["iterations_per_second"])
    )
    line["config"] = args.compiler_config if way in ("nexfort", "nexfort-fp8") else ""
    if way == "fp32":
        line["warmup_s"] = ""  # of two steps
    layers = [one for part in found.get("quantisation", {}).get("parts", {}).values() for one in part]
    if layers:
        line["packed"] = f"{sum(one['type'] is not None for one in layers)} of {len(layers)}"
    line["warmup_used_gib"] = _short(found["warmup_peak"].get("max_used_gib"))
    for key, column in (("reference", "error_to_fp32"), ("eager", "error_to_eager")):
        line[column] = _short(found.get(f"likeness_to_{key}", {}).get("latents"))
    near = found.get("likeness_to_eager", {})
    line.update(psnr=_short(near.get("psnr")), ssim=_short(near.get("ssim")))
    if way in ("nexfort", "nexfort-fp8"):
        line["compiled"] = found["warmup_made"]["compiled"]
        line["cached_s"] = _short(found["cached"]["warmup_s"])
        line["cached_compiled"] = found["cached"]["warmup_made"]["compiled"]
        line["sizes_compiled"] = " ".join(
            f"{'x'.join(map(str, one['size']))}:{one['compiled']}" for one in found.get("resolutions", ())
        )
    line["command"] = "python -m benchmarks.old_engine " + " ".join([name, *_given(args)])
    return line


def _given(args: argparse.Namespace) -> list[str]:
    """The flags that give such rows again."""
    given = ["--ways", args.ways] + (["--tiny"] if args.tiny else []) + (["--no-sweep"] if args.no_sweep else [])
    given += ["--fp32", "FOLDER"] if args.fp32 else []
    for flag in ("model", "more"):
        given += [f"--{flag}", shlex.quote(getattr(args, flag))] if getattr(args, flag) else []
    return given + ([] if args.compiler_config == CONFIG else ["--compiler-config", shlex.quote(args.compiler_config)])


def _short(value: Any) -> Any:
    return "" if value is None else float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
