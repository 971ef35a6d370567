"""Pictures and videos of noise."""

import io
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    values = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def write_video(
    path, frames, *, fps=10, height=48, width=64, codec="mpeg4", turned=0, stamps=None, seed=0
) -> None:
    """Frames of large blocks, all different; ``stamps``: of each, in units of 1 / fps."""
    import av

    noise = np.random.RandomState(frames + seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        stream.gop_size = 12
        for number in range(frames):
            blocks = noise.randint(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
            pixels = blocks.repeat(16, axis=0).repeat(16, axis=1)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if stamps is not None:
                frame.pts, frame.time_base = stamps[number], 1 / Fraction(fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
