"""Images in the formats that Pillow does not write: DICOM, HEIC, TIFF of many channels, and arrays."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pydicom
import tifffile
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, SecondaryCaptureImageStorage

__all__ = ["bands_of", "dicom_of", "npy_of", "npz_of"]

Values = npt.NDArray[Any]


def dicom_of(values: Values, *, bits: int = 0, **elements: Any) -> bytes:
    """Encode integers, (H, W), (H, W, 3) or frames (N, H, W) with ``NumberOfFrames``, as an uncompressed DICOM."""
    dataset = pydicom.Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = SecondaryCaptureImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = UID("1.2.3")
    colors = values.ndim == 3 and "NumberOfFrames" not in elements
    dataset.Rows, dataset.Columns = values.shape[:2] if colors else values.shape[-2:]
    dataset.SamplesPerPixel = 3 if colors else 1
    dataset.PhotometricInterpretation = "RGB" if colors else "MONOCHROME2"
    if colors:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = 8 * values.dtype.itemsize
    dataset.BitsStored = bits or dataset.BitsAllocated
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(values.dtype.kind == "i")
    dataset.PixelData = values.tobytes() + bytes(values.nbytes % 2)
    dataset["PixelData"].VR = "OW" if values.dtype.itemsize > 1 else "OB"
    for name, value in elements.items():
        setattr(dataset, name, value)
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()


def bands_of(values: Values, **options: Any) -> bytes:
    """Encode channels, (H, W, B), as a TIFF."""
    file = io.BytesIO()
    options = {"planarconfig": "contig", "photometric": "minisblack", **options}
    separate = options["planarconfig"] == "separate"
    written = np.ascontiguousarray(np.moveaxis(values, 2, 0)) if separate else values
    tifffile.imwrite(file, written, **options)
    return file.getvalue()


def npy_of(values: Values) -> bytes:
    """Encode an array as .npy."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def npz_of(*arrays: Values) -> bytes:
    """Encode arrays as a compressed .npz."""
    file = io.BytesIO()
    np.savez_compressed(file, *arrays)
    return file.getvalue()
