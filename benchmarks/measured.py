# SPDX-License-Identifier: Apache-2.0
"""What the old engine's scripts share: their flags, the checks before any long work, and the metrics in its words."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import compilers, pipelines, processes
from benchmarks.generation import Result, begin_peak, generate, peak_gib
from benchmarks.likeness import as_text, likeness
from benchmarks.unusable import Unusable

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


# ---- flags --------------------------------------------------------------------------------------------------


def yes_or_no(text: str) -> bool:
    """true, 1 and yes as the old scripts took them, and their opposites."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one of {', '.join(known)}")
    return known[text.lower()]


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number, 1 or more")
    return int(text)


def add_switch(parser: Any, flag: str, default: bool, text: str) -> None:
    """A flag that stands alone or before true, 1, yes, false, 0, no."""
    parser.add_argument(flag, type=yes_or_no, nargs="?", const=True, default=default, metavar="YES", help=text)


def add_shared_flags(parser: Any) -> None:
    """The flags that all scripts have."""
    add = parser.add_argument
    add("--variant", help="variant of the weight files, such as fp16")
    add("--custom-pipeline", help="a pipeline of the community, by its name")
    add("--seed", type=int, default=333)
    add("--warmups", type=count, default=1, help="whole generations before the one that is measured")
    add("--warmup-steps", type=count, help="steps of those (default: as many as are measured)")
    add("--batch", type=count, default=1, help="pictures (or videos) for the prompt")
    add("--extra-call-kwargs", metavar="JSON", help="further keywords for the pipeline's call")
    add("--compiler", choices=compilers.COMPILERS, default="nexfort")
    add("--compiler-config", metavar="JSON", help=f"options of Nexfort (default: {compilers.DEFAULT_CONFIG})")
    add_switch(parser, "--fuse_qkv_projections", True, "let diffusers fuse projections first, as the old engine did")
    add("--quantize", action="store_true", help="quantise the denoiser's weights first")
    add("--quantize-config", metavar="JSON", help=f"default: {compilers.DEFAULT_QUANTIZE}")
    add("--quant-submodules-config-path", metavar="FILE", help="JSON: layer -> its ssim, as quantize_pipe takes it")
    add("--dtype", choices=DTYPES, help="default: float16, or what --model random: says; float32 without a GPU")
    add("--device", help="default: cuda, or cpu where there is none")
    add("--cached-warmup", action="store_true", help="also: the warm-up of a second process, with what this one cached")
    add("--no-likeness", action="store_true", help="leave out the eager picture that a compiled one is compared with")
    add("--save-result", metavar="FILE", help="keep latents and pixels for --reference")
    add("--reference", metavar="FILE", help="also: the distance to what --save-result of another run kept")
    add("--json", metavar="FILE", help="write all figures as JSON")


def check_shared_flags(args: Any) -> dict[str, Any]:
    """Look at everything that needs no weights. Returns the keywords of --extra-call-kwargs. Raises Unusable."""
    if args.compiler != "nexfort":
        for flag in ("compiler_config", "quantize"):
            if getattr(args, flag):
                name = flag.replace("_", "-")
                raise Unusable(
                    f"--{name} is given with --compiler {args.compiler}; expected --compiler nexfort with it"
                )
    if not args.quantize and (args.quantize_config or args.quant_submodules_config_path):
        raise Unusable("a quantisation is described without --quantize; expected --quantize too")
    if args.cached_warmup and args.compiler == "none":
        raise Unusable("--cached-warmup is given with --compiler none, which caches nothing; leave one of them out")
    random = args.model.startswith(("random:", "tiny:"))
    if random and (args.variant or args.custom_pipeline):
        raise Unusable(f"--variant and --custom-pipeline are for stored pipelines, and --model is {args.model}")
    pipelines.check_model(args.model)
    if args.scheduler not in (None, "none"):
        pipelines.check_scheduler(args.scheduler)
    if args.reference and not Path(args.reference).is_file():
        raise Unusable(f"--reference is {args.reference}, and there is no such file; make it with --save-result")
    for flag in ("json", "save_result"):
        check_writable(f"--{flag.replace('_', '-')}", getattr(args, flag))
    return _keywords(args.extra_call_kwargs)


def check_writable(flag: str, path: str | None) -> None:
    """Raise Unusable where a file could not be written at the end."""
    if path and not Path(path).expanduser().absolute().parent.is_dir():
        raise Unusable(f"{flag} is {path}, and its folder does not exist; make it first")


def _keywords(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise Unusable(f"--extra-call-kwargs is not JSON: {error}; expected an object") from error
    if not isinstance(found, dict):
        raise Unusable(f"--extra-call-kwargs is {text}; expected an object such as " + '{"guidance_scale": 5.0}')
    return found


def device_and_dtype(args: Any) -> tuple[torch.device, torch.dtype]:
    """Where and in what the pipeline runs. Raises Unusable."""
    from benchmarks import random_pipelines

    cuda = torch.cuda.is_available()
    try:
        device = torch.device(args.device or ("cuda" if cuda else "cpu"))
    except RuntimeError as error:
        raise Unusable(f"--device is {args.device!r}; expected cuda, cuda:1 or cpu") from error
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not cuda):
        raise Unusable(f"--device is {args.device!r}, and this machine has {'CUDA' if cuda else 'no CUDA device'}")
    if getattr(args, "parallel", None):
        device = processes.own_device(device)
    if args.dtype:
        return device, DTYPES[args.dtype]
    if device.type == "cpu":
        return device, torch.float32
    random = random_pipelines.is_random(args.model)
    return device, random_pipelines.recipe_of(args.model)[0].dtype if random else torch.float16


# ---- the run ------------------------------------------------------------------------------------------------


class Measured:
    """One pipeline through one compiler; `found` gathers the figures that --json writes."""

    def __init__(self, args: Any, keywords: dict[str, Any]) -> None:
        self.args = args
        self.device, dtype = device_and_dtype(args)
        config = compilers.parse_config(args.compiler_config) if args.compiler == "nexfort" else None
        quantize = None
        if args.quantize:
            quantize = compilers.parse_quantize(args.quantize_config, args.quant_submodules_config_path)
        if dtype == torch.float32:  # whoever asks for it wants the truth, and torch would round in convolutions
            torch.backends.cudnn.allow_tf32 = False
        self.source = pipelines.load(args, self.device, dtype)
        pipe = self.source.pipe
        parallel = processes.parse(args.parallel) if getattr(args, "parallel", None) else {}
        if parallel:
            processes.split(pipe, parallel)
        pipe.set_progress_bar_config(disable=True)
        pipelines.check_keywords(pipe, keywords)
        self.size = (args.height or self.source.size[0], args.width or self.source.size[1])
        self.call = self.source.call = {**self.source.call, **keywords}
        pipelines.check_size(pipe, *self.size, self.call)
        self.before: dict[str, torch.Tensor] | None = None
        self._quantize = quantize
        self._config = config
        self.compiled: compilers.Compiled
        self.found: dict[str, Any] = {
            **{"model": args.model, "device": _device_name(self.device), "torch": torch.__version__},
            **{"dtype": str(dtype).removeprefix("torch."), "size": list(self.size), "steps": args.steps},
            **{"batch": args.batch, "seed": args.seed, "compiler": args.compiler},
            "parallel": parallel,
            **{"scheduler": type(pipe.scheduler).__name__, "pipeline": type(pipe).__name__},
            "config": config.as_dict() if config is not None else {},
        }

    def run_at(self, size: tuple[int, int], pipe: Any = None, **more: Any) -> Result:
        """One generation at a height and width, with the same seed as all others."""
        call = {**self.call, "height": size[0], "width": size[1], **more}
        return generate(pipe or self.compiled.pipe, call, self.args.seed, self.device)

    def compile(self) -> None:
        """Quantise, compile, and say what of it has no effect."""
        args, fuse = self.args, self.args.fuse_qkv_projections
        if self._quantize is not None:
            self._quantise(fuse)
            fuse = False
        self.compiled = compilers.apply(self.source.pipe, args.compiler, self._config, fuse)
        self.found["inactive"] = self.compiled.inactive
        for row in self.compiled.inactive:
            say(f"not active: {row['token']}: {row['reason']}")

    def _quantise(self, fuse: bool) -> None:
        """Pack the denoiser's weights, and say the plan. The whole weights go: they would count as used memory."""
        pipe = self.source.pipe
        if fuse and hasattr(pipe, "fuse_qkv_projections"):
            pipe.fuse_qkv_projections()
        call = {**self.call, "height": self.size[0], "width": self.size[1]}
        del call["num_inference_steps"]  # one is enough to see what the networks are given
        quantised = compilers.quantized(pipe, self._quantize, call)
        if not self.args.no_likeness:
            self.before = self.run_at(self.size, pipe).kept()
        self.source.pipe = quantised
        del pipe
        gc.collect()
        self.found["quantisation"] = quantised.quantisation.as_dict()
        say(str(quantised.quantisation))

    def warm_up(self) -> None:
        """The warm-up, whose first generation compiles or loads."""
        begin_peak(self.device)
        marks = self.compiled.mark()
        fewer = {"num_inference_steps": self.args.warmup_steps} if self.args.warmup_steps else {}
        say("Begin warmup")
        began = time.perf_counter()
        for _ in range(self.args.warmups):
            self.run_at(self.size, **fewer)
        self.found["warmup_s"] = time.perf_counter() - began
        say("End warmup")
        say(f"Warmup time: {self.found['warmup_s']:.3f}s")
        self.found["warmup_peak"] = peak_gib(self.device)
        made = self.compiled.made_since(marks)
        self.found["warmup_made"] = made
        if self.compiled.reports:
            say(f"Artefacts: {made['compiled']} compiled, {made['loaded']} loaded")
            for line in made["eager"]:
                say(f"eager: {line}")

    def measure(self) -> Result:
        """The generation that counts."""
        begin_peak(self.device)
        result = self.run_at(self.size)
        found = {"inference_s": result.seconds, "iterations_per_second": result.rate, **peak_gib(self.device)}
        found["finite"] = bool(result.latents.isfinite().all()) if result.latents is not None else None
        self.found.update(found)
        say(f"Inference time: {result.seconds:.3f}s")
        rate = "not measured, it needs two steps" if result.rate is None else f"{result.rate:.3f}"
        say(f"Iterations per second: {rate}")
        if "max_used_gib" in found:
            warm = self.found["warmup_peak"]
            say(f"Max used CUDA memory : {max(found['max_used_gib'], warm['max_used_gib']):.3f}GiB")
            say(f"Max reserved CUDA memory : {max(found['max_reserved_gib'], warm['max_reserved_gib']):.3f}GiB")
            say(f"Max used CUDA memory after the warmup : {found['max_used_gib']:.3f}GiB")
        return result

    def compare(self, result: Result) -> None:
        """How near the result is to eager's of the same seed, and to --reference."""
        ours = result.kept()
        if self.args.save_result and processes.is_first():
            torch.save(ours, self.args.save_result)
        if self.args.reference:
            self._compared("reference", ours, torch.load(self.args.reference, weights_only=True))
        if self.args.compiler == "none" or self.args.no_likeness:
            return
        if self.before is None:
            self._compared("eager", ours, self.run_at(self.size, self.compiled.back()).kept())
            return
        self._compared("eager", ours, self.before)  # with whole weights
        # what compiling adds: with the same packed ones, fused as they are
        self._compared("quantised_eager", ours, self.run_at(self.size, self.source.pipe).kept())

    def _compared(self, name: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
        try:
            self.found[f"likeness_to_{name}"] = likeness(ours, theirs)
        except ValueError as error:
            say(f"Not compared to {name.replace('_', ' ')}: {error}")
        else:
            say(f"To {name.replace('_', ' ')}: {as_text(self.found[f'likeness_to_{name}'])}")

    def finish(self, script: str, arguments: list[str]) -> None:
        """The warm-up of a second process, and the file of figures. The pipeline is gone afterwards."""
        if self.args.cached_warmup:
            del self.compiled, self.source
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            again = _second_process(script, arguments)
            self.found["cached"] = again
            say(f"Warmup with Cache time: {again['warmup_s']:.3f}s")
            if self.args.compiler == "nexfort":
                made = again["warmup_made"]
                say(f"Artefacts: {made['compiled']} compiled, {made['loaded']} loaded")
        if self.args.json and processes.is_first():
            Path(self.args.json).expanduser().write_text(json.dumps(self.found, indent=1), encoding="utf-8")


def _second_process(script: str, arguments: list[str]) -> dict[str, Any]:
    """The figures of the same command in a new process, which finds what this one cached."""
    kept = [one for one in arguments if one != "--cached-warmup"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "again.json"
        command = [sys.executable, script, *kept, "--no-likeness", "--only-main", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the second process ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(file.read_text(encoding="utf-8"))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def say(text: str) -> None:
    """One line for people; at once, because the next one may take minutes. Of several processes one speaks."""
    if processes.is_first():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
