# SPDX-License-Identifier: Apache-2.0
"""The old engine's text_to_video_latte.py, run with this one: Latte through diffusers' LattePipeline.

    python3 benchmarks/text_to_video_latte.py --model maxin-cn/Latte-1 --steps 50 --compiler nexfort \\
        --output-video latte.mp4 --prompt "An epic tornado attacking above a glowing city at night."

--model is a name on the hub, a folder, random:latte (full size, random weights, no download) or tiny:latte (for a CPU).
A video ending in .gif, .webp or .png is written by Pillow, any other by PyAV. Exit codes as in text_to_image.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: the project is not installed, and its root is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.unusable import Unusable
from benchmarks.video_file import check_video_file, write_video


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from benchmarks.measured import add_shared_flags, add_switch, count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="maxin-cn/Latte-1", help="a name on the hub, a folder, random:latte or tiny:latte")
    add("--prompt", default="An epic tornado attacking above aglowing city at night.")
    add("--steps", type=count, default=50)
    add("--height", type=int, help="default: 512, or the tiny model's own")
    add("--width", type=int, help="default: 512, or the tiny model's own")
    add("--video-length", type=count, help="frames (default: as many as the model was made for, 16)")
    add("--fps", type=count, default=8)
    add("--guidance-scale", type=float, default=7.5)
    add("--beta-start", type=float, help="of the scheduler (default: the pipeline's; the old engine's was 0.0001)")
    add("--beta-end", type=float, help="of the scheduler (default: the pipeline's; the old engine's was 0.02)")
    add("--beta-schedule", help="of the scheduler (default: the pipeline's; the old engine's was linear)")
    add("--scheduler", default="none", help='a scheduler of diffusers, or "none" for the pipeline\'s')
    add_switch(parser, "--enable_temporal_attentions", True, "run the blocks that look along time")
    add("--decode-chunk-size", type=count, help="frames that the VAE decodes at once (default: the pipeline's)")
    add("--output-video", metavar="FILE", default="output.mp4")
    add("--only-main", action="store_true", help=argparse.SUPPRESS)
    add_shared_flags(parser)
    parser.set_defaults(seed=25)
    args = parser.parse_args(argv)
    args.pipeline, args.input_image = "LattePipeline", None
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    try:
        run(args, arguments)
    except Unusable as error:
        sys.stderr.write(f"text_to_video_latte: {error}\n")
        return 2
    return 0


def run(args: argparse.Namespace, arguments: list[str]) -> None:
    """Check, measure, write the video. Raises Unusable before the first generation."""
    from benchmarks.measured import Measured, check_shared_flags, check_writable

    keywords = check_shared_flags(args)
    if args.model.partition(":")[0] in ("random", "tiny") and not args.model.endswith(":latte"):
        raise Unusable(f"--model is {args.model}, which makes pictures; expected benchmarks/text_to_image.py for it")
    check_writable("--output-video", args.output_video)
    check_video_file("--output-video", args.output_video)
    measured = Measured(args, keywords)
    _set_betas(measured.source.pipe, args)
    measured.call.update(_call(args, measured.source.pipe.transformer.config.video_length))
    measured.compile()
    measured.warm_up()
    result = measured.measure()
    if not args.only_main:
        frames = result.pictures[: len(result.pictures) // args.batch]
        write_video(Path(args.output_video).expanduser(), frames, args.fps)
        measured.compare(result)
    measured.finish(str(Path(__file__).resolve()), arguments)


def _call(args: argparse.Namespace, own_length: int) -> dict[str, Any]:
    """Keywords of the pipeline's call but for its size. Raises Unusable for a length that the model cannot take."""
    length = args.video_length or own_length
    if length != own_length and args.enable_temporal_attentions:
        raise Unusable(
            f"--video-length is {length}: this Latte was made for videos of {own_length} frames; leave it out"
        )
    found: dict[str, Any] = {"prompt": args.prompt, "num_inference_steps": args.steps}
    found["num_images_per_prompt"] = args.batch
    found["guidance_scale"] = args.guidance_scale
    found["enable_temporal_attentions"] = args.enable_temporal_attentions
    found["video_length"] = length
    if args.decode_chunk_size:
        found["decode_chunk_size"] = args.decode_chunk_size
    return found


def _set_betas(pipe: Any, args: argparse.Namespace) -> None:
    asked = {"beta_start": args.beta_start, "beta_end": args.beta_end, "beta_schedule": args.beta_schedule}
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked:
        return
    try:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **asked)
    except (NotImplementedError, ValueError) as error:
        raise Unusable(f"a {type(pipe.scheduler).__name__} takes no {asked}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
