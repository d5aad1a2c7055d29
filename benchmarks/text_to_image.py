# SPDX-License-Identifier: Apache-2.0
"""The old engine's text_to_image.py, run with this one: the same commands and metrics on diffusers' pipelines.

    python3 benchmarks/text_to_image.py --model random:sdxl --scheduler none --steps 20 --compiler nexfort \\
        --compiler-config '{"mode": "O2", "memory_format": "channels_last"}' --output-image out.png

--model is a name on the hub, a folder, or random:sd21, random:sdxl, random:pixart, random:flux and
random:sd3 (full size, random weights, no download); tiny: instead of random: makes one for a CPU. Exit codes: 0 done,
2 what was asked cannot be run, with the reason in one sentence before any long work.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: the project is not installed, and its root is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.unusable import Unusable

RESOLUTIONS = (1024, 512, 768, 256)
RARE_RESOLUTION = (544, 408)
THROUGHPUT_SIDE, THROUGHPUT_STEPS = 1024, 99


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from benchmarks.measured import add_shared_flags, add_switch, count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="runwayml/stable-diffusion-v1-5", help="a name on the hub, a folder, random:..., tiny:...")
    add("--scheduler", help='a scheduler of diffusers, or "none" for the pipeline\'s (default: EulerAncestral...)')
    add("--lora", help="a LoRA, loaded and fused")
    add("--controlnet", help='a name on the hub, a folder, or "random"')
    add("--steps", type=count, default=30)
    add("--prompt", default="best quality, realistic, unreal engine, 4K, a beautiful girl")
    add("--negative-prompt", default="")
    add("--height", type=int, help="default: the model's own")
    add("--width", type=int, help="default: the model's own")
    add("--input-image", metavar="FILE", help="start from this picture")
    add("--control-image", metavar="FILE", help="what the ControlNet sees (default: a circle)")
    add("--output-image", metavar="FILE")
    add("--print-output", action="store_true", help="show the picture in the terminal")
    add("--throughput", action="store_true", help=f"time runs of 1 to {THROUGHPUT_STEPS} steps and fit a line")
    add("--throughput-steps", type=count, default=THROUGHPUT_STEPS, help="the most steps of --throughput")
    sixteen = f"one run at each of 16 sizes, of {RESOLUTIONS}"
    add_switch(parser, "--run_multiple_resolutions", False, sixteen)
    add_switch(parser, "--run_rare_resolutions", False, f"one run at {RARE_RESOLUTION[0]}x{RARE_RESOLUTION[1]}")
    add("--parallel", metavar="KIND:N", help="split over N processes of torchrun: ulysses:2, ring:2 or both")
    add("--only-main", action="store_true", help=argparse.SUPPRESS)  # what a second process for --cached-warmup does
    add_shared_flags(parser)
    args = parser.parse_args(argv)
    args.pipeline = "AutoPipelineForImage2Image" if args.input_image else "AutoPipelineForText2Image"
    return args


def check(args: argparse.Namespace) -> dict[str, Any]:
    """All that can be wrong with the command line alone. Returns the keywords for the pipeline's call."""
    from benchmarks import processes
    from benchmarks.measured import check_shared_flags, check_writable
    from benchmarks.pipelines import check_model

    keywords = check_shared_flags(args)
    if args.parallel:
        for flag in ("cached_warmup", "quantize", "controlnet"):
            if getattr(args, flag):
                raise Unusable(f"--parallel is given with --{flag.replace('_', '-')}; expected one of them")
        processes.check(processes.parse(args.parallel), "benchmarks/text_to_image.py")
    if args.control_image and not args.controlnet:
        raise Unusable("--control-image is given without --controlnet; expected both or neither")
    if args.controlnet and args.controlnet != "random":
        check_model(args.controlnet, "--controlnet")
    if args.model.endswith(":latte"):
        raise Unusable("--model is a model of videos; expected benchmarks/text_to_video_latte.py for it")
    for flag in ("input_image", "control_image"):
        path = getattr(args, flag)
        if path and not Path(path).expanduser().is_file():
            raise Unusable(f"--{flag.replace('_', '-')} is {path}, and there is no such file")
    check_writable("--output-image", args.output_image)
    return keywords


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    try:
        keywords = check(args)
        with _processes(args):
            run(args, keywords, arguments)
    except Unusable as error:
        sys.stderr.write(f"text_to_image: {error}\n")
        return 2
    return 0


def _processes(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """Where several processes make a picture, they speak with each other inside the block."""
    if not args.parallel:
        return nullcontext()
    from benchmarks import processes
    from benchmarks.measured import device_and_dtype

    return processes.group(device_and_dtype(args)[0].type)


def run(args: argparse.Namespace, keywords: dict[str, Any], arguments: list[str]) -> None:
    """Everything after the checks of the command line. Raises Unusable before the first generation."""
    from benchmarks.measured import Measured
    from benchmarks.processes import is_first

    measured = Measured(args, keywords)
    measured.call.update(_call(args, measured.size))
    measured.compile()
    measured.warm_up()
    result = measured.measure()
    picture = result.pictures[0]
    if args.output_image and is_first():
        picture.save(Path(args.output_image).expanduser())
    if args.print_output and is_first():
        _show(picture)
    if not args.only_main:
        sizes = [(h, w) for h in RESOLUTIONS for w in RESOLUTIONS] if args.run_multiple_resolutions else []
        sizes += [RARE_RESOLUTION] if args.run_rare_resolutions else []
        measured.found["resolutions"] = [_at(measured, size) for size in sizes]
        if args.throughput:
            measured.found["throughput"] = _throughput(measured, args.throughput_steps)
        measured.compare(result)
    measured.finish(str(Path(__file__).resolve()), arguments)


def _call(args: argparse.Namespace, size: tuple[int, int]) -> dict[str, Any]:
    """Keywords of the pipeline's call but for its size."""
    found: dict[str, Any] = {"prompt": args.prompt, "num_inference_steps": args.steps}
    found["num_images_per_prompt"] = args.batch
    if args.negative_prompt:  # pipelines without guidance know no such thing
        found["negative_prompt"] = args.negative_prompt
    if args.input_image:
        found["image"] = _opened(args.input_image, size)
    if args.controlnet:
        seen = _opened(args.control_image, size) if args.control_image else _circle(size)
        found["control_image" if args.input_image else "image"] = seen
    return found


def _opened(path: str, size: tuple[int, int]) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(Path(path).expanduser()).convert("RGB").resize((size[1], size[0]))
    except UnidentifiedImageError as error:
        raise Unusable(f"{path} is no picture that can be read; expected PNG or JPEG") from error


def _circle(size: tuple[int, int]) -> Any:
    from PIL import Image, ImageDraw

    height, width = size
    picture = Image.new("RGB", (width, height), (0, 0, 0))
    box = (width // 4, height // 4, width * 3 // 4, height * 3 // 4)
    ImageDraw.Draw(picture).ellipse(box, outline=(255, 255, 255), width=max(1, min(size) // 64))
    return picture


def _at(measured: Any, wanted: tuple[int, int]) -> dict[str, Any]:
    """One run at another size: seconds, and what was compiled for it."""
    from benchmarks.measured import say

    size = measured.source.fitted(*wanted)
    marks = measured.compiled.mark()
    say(f"Running at resolution: {size[0]}x{size[1]}")
    result = measured.run_at(size, **_pictures_at(measured.call, size))
    made = measured.compiled.made_since(marks)
    say(f"Inference time: {result.seconds:.2f} seconds")
    if measured.compiled.reports:
        say(f"Artefacts: {made['compiled']} compiled, {made['loaded']} loaded")
        for line in made["eager"]:
            say(f"eager: {line}")
    return {
        "size": list(size),
        "latents": list(result.latents.shape) if result.latents is not None else None,
        "seconds": result.seconds,
        "iterations_per_second": result.rate,
        **made,
    }


def _pictures_at(call: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """The pictures that a call is given, at another size."""
    names = [name for name in ("image", "control_image") if name in call]
    return {name: call[name].resize((size[1], size[0])) for name in names}


def _throughput(measured: Any, most: int) -> dict[str, float]:
    """Runs of 1 to `most` steps at 1024x1024: their average, and the line through their times."""
    from benchmarks.generation import line_through
    from benchmarks.measured import say

    size = measured.source.fitted(THROUGHPUT_SIDE, THROUGHPUT_SIDE)
    more = _pictures_at(measured.call, size)
    measured.run_at(size, **more)  # its graphs, if any, are made once and not timed
    points = []
    for steps in range(1, most + 1):
        seconds = measured.run_at(size, num_inference_steps=steps, **more).seconds
        points.append((steps, seconds))
        say(f"Steps: {steps}, Inference Time: {seconds:.3f} seconds, Throughput: {steps / seconds:.2f} steps/s")
    found = {"average": sum(steps / seconds for steps, seconds in points) / len(points)}
    say(f"Average Throughput: {found['average']:.2f} steps/s")
    if most > 1:
        slope, base = line_through(points)
        found.update(slope=slope, base=base, without_base=1 / slope if slope else 0.0)
        say(f"Throughput without base cost: {found['without_base']:.2f} steps/s")
        say(f"Model: Inference Time = {slope:.4f} * Steps + {base:.4f}")
    return found


def _show(picture: Any, columns: int = 80) -> None:
    """A picture as coloured half blocks, two rows of it in each line of the terminal."""
    rows = max(2, round(picture.height / picture.width * columns) // 2 * 2)
    small = picture.convert("RGB").resize((columns, rows))
    for y in range(0, rows, 2):
        line = ""
        for x in range(columns):
            top, below = small.getpixel((x, y)), small.getpixel((x, y + 1))
            line += "\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m▀".format(*top, *below)
        sys.stdout.write(line + "\x1b[0m\n")


if __name__ == "__main__":
    sys.exit(main())
