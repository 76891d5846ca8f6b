"""Small copies of pictures for a page that carries everything in itself."""

import base64
import io

from clipkit.errors import DataError

__all__ = ["THUMBNAIL_SIZE", "thumbnail"]

THUMBNAIL_SIZE = 96  # pixels of the longer side


def thumbnail(data: bytes) -> str:
    """A base64 PNG of at most 96 pixels a side; "" if the picture does not decode (it is then shown as missing)."""
    from PIL import Image

    from clipkit.decode import decode_image

    try:
        image = Image.fromarray(decode_image(data))
    except DataError:
        return ""
    image.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
