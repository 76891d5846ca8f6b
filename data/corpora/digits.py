"""The built-in evaluation set `digits`: real handwriting, to score a model that has only seen printed type.

The 1,797 digits of the UCI machine learning repository that scikit-learn ships, 8 x 8 pixels with 17 grey
levels (E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", 1998, CC BY 4.0). It has a test
split only: none of it is to be trained on.
"""

from io import BytesIO
from pathlib import Path

from clipkit.errors import DataError
from data.shards.writer import DatasetWriter, Record

__all__ = ["CLASS_NAMES", "REVISION", "TEMPLATES", "make"]

#: Changes whenever the pictures, labels, names or templates do.
REVISION = "1"

CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

TEMPLATES = (
    "the digit {c}",
    "the number {c}",
    "a photo of the digit {c}",
    "a photo of the number {c}",
    "a scan of the digit {c}",
    "a handwritten digit {c}",
    "the handwritten number {c}",
)


def make(out: Path) -> None:
    """Write the set: 8-bit grey PNGs of 8 x 8 pixels, light ink on black as stored, 0..16 stretched to 0..255.

    Raises:
        DataError: scikit-learn is not installed, or ``out`` already holds something.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: run pip install -e '.[eval]'") from error
    from PIL import Image

    bunch = load_digits()
    pictures = (bunch.images * 255 / 16).round().astype("uint8")  # (1797, 8, 8)
    with DatasetWriter(out) as writer:
        for number, (picture, label) in enumerate(zip(pictures, bunch.target.tolist(), strict=True)):
            buffer = BytesIO()
            Image.fromarray(picture).save(buffer, "png")
            caption = f"a handwritten digit {CLASS_NAMES[label]}"
            record = Record(
                key=f"{number:08d}", image=buffer.getvalue(), extension="png", caption=caption, label=label
            )
            writer.write("test", record)
        card = {
            "name": "digits",
            "revision": REVISION,
            "license": "CC BY 4.0",
            "source": "UCI Optical Recognition of Handwritten Digits, test part, as scikit-learn ships it",
            "how": "8 x 8 counts of ink from 0 to 16, times 255 / 16; light ink on black",
            "metric": "accuracy",
        }
        writer.finish(card, class_names=CLASS_NAMES, templates=TEMPLATES)
