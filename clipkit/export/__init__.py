"""Write models for other libraries, with tokenizer, preprocessing, model card and known scores.

    open_clip                open_clip_config.json, open_clip_model.safetensors
    transformers             config.json, model.safetensors, preprocessor_config.json, the tokenizer's files
    sentence-transformers    the same, modules.json and others
    timm                     config.json, model.safetensors: the image tower alone
    onnx                     visual.onnx, textual.onnx, onnx_config.json, tokenizer.json (not for class heads)
    onnx-int8                the same with int8 weights
    openvino                 visual.xml, visual.bin, textual.xml, textual.bin, openvino_config.json, tokenizer.json
    openvino-int8            the same with int8 weights

One folder can contain several exports, but not timm and transformers or sentence-transformers, because their files
have the same names, and only one of the last four. ``EXPORTS`` registers the targets.
"""

from clipkit.export.interpolation import interpolate, load_interpolatable
from clipkit.export.targets import EXPORTS, ExportTarget
from clipkit.export.write import export

__all__ = ["EXPORTS", "ExportTarget", "export", "interpolate", "load_interpolatable"]
