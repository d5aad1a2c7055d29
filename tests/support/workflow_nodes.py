# SPDX-License-Identifier: Apache-2.0
"""The node types that the example workflows are made of: their titles, outputs, and inputs that are linked.

Everything else about an input is a widget. tests/nodes/test_workflows.py holds this table against a real server.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One node type.

    outputs: their types. sockets: the inputs that are linked, in the server's order; an optional one may be left out.
    names: of the outputs, where they differ from the types. taller: pixels that text or a picture on the node takes.
    """

    title: str
    outputs: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    taller: int = 0

    @property
    def output_names(self) -> tuple[str, ...]:
        """As the canvas shows them."""
        return self.names or self.outputs


BOTH = ("positive", "negative")
SAMPLED = ("output", "denoised_output")
LATENTS = ("LATENT", "LATENT")
CONDITIONINGS = ("CONDITIONING", "CONDITIONING")
KSAMPLER = ("model", "positive", "negative", "latent_image")

KINDS = {
    # what is loaded
    "CheckpointLoaderSimple": Kind("Checkpoint", ("MODEL", "CLIP", "VAE")),
    "UNETLoader": Kind("Diffusion model", ("MODEL",)),
    "CLIPLoader": Kind("Text encoder", ("CLIP",)),
    "DualCLIPLoader": Kind("Text encoders", ("CLIP",)),
    "VAELoader": Kind("VAE", ("VAE",)),
    "ControlNetLoader": Kind("ControlNet", ("CONTROL_NET",)),
    "LTXAVTextEncoderLoader": Kind("Text encoder", ("CLIP",)),
    "LTXVAudioVAELoader": Kind("VAE of the sound", ("VAE",), names=("Audio VAE",)),
    "LoraLoader": Kind("LoRA", ("MODEL", "CLIP"), ("model", "clip")),
    "LoraLoaderModelOnly": Kind("LoRA", ("MODEL",), ("model",)),
    "LoadImage": Kind("Picture", ("IMAGE", "MASK"), taller=300),
    # what is made of a model
    "ModelSamplingSD3": Kind("Shift of the noise", ("MODEL",), ("model",)),
    "ModelSamplingAuraFlow": Kind("Shift of the noise", ("MODEL",), ("model",)),
    "NexfortCompileModel": Kind("Nexfort Compile Model", ("MODEL",), ("model",), ("model",), taller=60),
    "NexfortCompileVAE": Kind("Nexfort Compile VAE", ("VAE",), ("vae",), ("vae",), taller=60),
    "NexfortCompileControlNet": Kind(
        "Nexfort Compile ControlNet", ("CONTROL_NET",), ("control_net",), ("control_net",), taller=60
    ),
    # what is asked for
    "CLIPTextEncode": Kind("Prompt", ("CONDITIONING",), ("clip",), taller=110),
    "ConditioningZeroOut": Kind("No negative prompt", ("CONDITIONING",), ("conditioning",)),
    "FluxGuidance": Kind("Guidance", ("CONDITIONING",), ("conditioning",)),
    "ReferenceLatent": Kind("Picture to change", ("CONDITIONING",), ("conditioning", "latent")),
    "LTXVConditioning": Kind("Frame rate", CONDITIONINGS, BOTH, BOTH),
    "ControlNetApplyAdvanced": Kind(
        "Apply the ControlNet", CONDITIONINGS, (*BOTH, "control_net", "image", "vae"), BOTH
    ),
    "TextEncodeQwenImageEditPlus": Kind("Prompt", ("CONDITIONING",), ("clip", "vae", "image1"), taller=90),
    "FluxKontextMultiReferenceLatentMethod": Kind("Place of the picture", ("CONDITIONING",), ("conditioning",)),
    "WanImageToVideo": Kind(
        "Size and first picture", (*CONDITIONINGS, "LATENT"), (*BOTH, "vae", "start_image"), (*BOTH, "latent")
    ),
    "MiniMaxH3ImageToVideo": Kind(
        "Prompt and size", ("CONDITIONING", "LATENT"), ("clip", "vae"), ("positive", "LATENT"), taller=90
    ),
    # pictures and latents
    "EmptyLatentImage": Kind("Image size", ("LATENT",)),
    "EmptySD3LatentImage": Kind("Image size", ("LATENT",)),
    "EmptyHunyuanLatentVideo": Kind("Video size", ("LATENT",)),
    "EmptyLTXVLatentVideo": Kind("Video size", ("LATENT",)),
    "EmptyFlux2LatentImage": Kind("Image size", ("LATENT",)),
    "LTXVEmptyLatentAudio": Kind("Length of the sound", ("LATENT",), ("audio_vae",), ("Latent",)),
    "LTXVConcatAVLatent": Kind("Video and sound", ("LATENT",), ("video_latent", "audio_latent"), ("latent",)),
    "LTXVSeparateAVLatent": Kind("Video, sound", LATENTS, ("av_latent",), ("video_latent", "audio_latent")),
    "ImageScale": Kind("Size of the result", ("IMAGE",), ("image",)),
    "FluxKontextImageScale": Kind("A size that Kontext knows", ("IMAGE",), ("image",)),
    "Canny": Kind("Edges", ("IMAGE",), ("image",)),
    "VAEEncode": Kind("Encode", ("LATENT",), ("pixels", "vae")),
    # sampling
    "KSampler": Kind("Sampler", ("LATENT",), KSAMPLER),
    "KSamplerAdvanced": Kind("Sampler", ("LATENT",), KSAMPLER),
    "SamplerCustom": Kind("Sampler", LATENTS, (*KSAMPLER[:3], "sampler", "sigmas", "latent_image"), SAMPLED),
    "SamplerCustomAdvanced": Kind(
        "Sampler", LATENTS, ("noise", "guider", "sampler", "sigmas", "latent_image"), SAMPLED
    ),
    "KSamplerSelect": Kind("Sampling method", ("SAMPLER",)),
    "BasicScheduler": Kind("Steps", ("SIGMAS",), ("model",)),
    "LTXVScheduler": Kind("Steps", ("SIGMAS",), ("latent",)),
    "ManualSigmas": Kind("Steps", ("SIGMAS",)),
    "Flux2Scheduler": Kind("Steps", ("SIGMAS",)),
    "CFGGuider": Kind("Guider", ("GUIDER",), ("model", *BOTH)),
    "BasicGuider": Kind("Guider", ("GUIDER",), ("model", "conditioning")),
    "RandomNoise": Kind("Seed", ("NOISE",)),
    # results
    "VAEDecode": Kind("Decode", ("IMAGE",), ("samples", "vae")),
    "VAEDecodeTiled": Kind("Decode in tiles", ("IMAGE",), ("samples", "vae")),
    "VAEDecodeAudio": Kind("Decode the sound", ("AUDIO",), ("samples", "vae")),
    "LTXVAudioVAEDecode": Kind("Decode the sound", ("AUDIO",), ("samples", "audio_vae"), ("Audio",)),
    "CreateVideo": Kind("Frames to a video", ("VIDEO",), ("images", "audio")),
    "SaveImage": Kind("Save the image", (), ("images",), taller=300),
    "SaveVideo": Kind("Save the video", (), ("video",), taller=300),
}
