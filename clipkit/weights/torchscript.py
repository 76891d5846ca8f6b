"""TorchScript archives, as OpenAI published CLIP: their state dict without running them.

``ROOT/data.pkl`` holds the tree of modules with their attributes, ``ROOT/code/__torch__/….py`` the source of
their classes. The source is read as text, for the two lines of each class that say which attributes are
parameters and which are buffers; nothing of it is compiled.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from clipkit.errors import CheckpointError
from clipkit.weights.inert_pickle import ScriptObject, StoredTensor
from clipkit.weights.torch_file import Archive

__all__ = ["is_torchscript", "read_torchscript"]

MAX_NAMES = 1_000_000  # attributes of all modules, a part that is used twice counted twice
MAX_DEPTH = 100
MAX_LENGTH = 1_000  # of a name
_CLASS = re.compile(r"class (\w+)(?:\((\w+)\))?:")
_NAMES = re.compile(r"  __(parameters|buffers)__ = \[(.*)\]")
_NAME = re.compile(r'"([^"]*)"')


def is_torchscript(archive: Archive) -> bool:
    """Whether an archive is of ``torch.jit.save``, not of ``torch.save``."""
    return "constants.pkl" in archive


def read_torchscript(archive: Archive) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The state dict (parameters and buffers of all modules, by their dotted names) and the outermost
    module's other attributes.

    Raises:
        CheckpointError: the archive is damaged, names what is not allowed, or cannot be read without running it.
    """
    top = archive.read_pickle("data.pkl", script=True)
    archive.read_pickle("constants.pkl", script=True)  # only to refuse what a program would stumble over
    if not isinstance(top, ScriptObject):
        raise CheckpointError(f"{archive.origin} is an archive of TorchScript without a module")
    storages = archive.storages("data")
    tensors = {
        name: storages.tensor(stored, name)
        for name, stored in _Walk(archive).tensors(top, prefix="", depth=0)
    }
    attributes = top.state if isinstance(top.state, dict) else {}
    return tensors, {name: value for name, value in attributes.items() if not name.startswith("_")}


@dataclass(frozen=True, kw_only=True)
class _Class:
    module: bool
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] | None = None  # None: written before PyTorch said so, each tensor is one


class _Walk:
    """Over the tree of modules, in the order of ``state_dict``: a module's parameters, buffers, then its parts."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._names = 0
        self._files: dict[str, dict[str, _Class]] = {}

    def tensors(
        self, module: ScriptObject, prefix: str = "", depth: int = 0
    ) -> Iterator[tuple[str, StoredTensor]]:
        shape = self._class_of(module)
        if not shape.module:
            return
        state = module.state
        if not isinstance(state, dict):
            raise self._error(f"{module.class_name[:120]!r} can only be read by running its code")
        self._names += 1 + len(state) + len(shape.parameters) + len(shape.buffers or ())
        if self._names > MAX_NAMES or depth > MAX_DEPTH or len(prefix) > MAX_LENGTH:
            raise self._error("its modules hold each other without an end")
        buffers = shape.buffers
        if buffers is None:
            others = state.keys() - set(shape.parameters)
            buffers = tuple(
                name for name in state if name in others and isinstance(state[name], StoredTensor)
            )
        for name in (*shape.parameters, *buffers):
            value = state.get(name, module)
            if len(prefix) + len(name) > MAX_LENGTH:
                raise self._error(f"a tensor has a name of {len(prefix) + len(name)} letters")
            if isinstance(value, StoredTensor):
                yield prefix + name, value
            elif value is not None:  # None is a linear layer's bias that it does not have
                raise self._error(f"{(prefix + name)[:120]!r} is not a tensor that can be read")
        for name, value in state.items():
            if isinstance(value, ScriptObject):
                yield from self.tensors(value, f"{prefix}{name}.", depth + 1)

    def _class_of(self, module: ScriptObject) -> _Class:
        """What the source says of an object's class."""
        file, _, name = module.class_name.rpartition(".")
        if file == "__torch__.torch.classes" or file.startswith("__torch__.torch.classes."):
            return _Class(module=False)  # of a library in C++
        path = f"code/{file.replace('.', '/')}.py"
        if path not in self._files:
            source = self._archive.inflate(path).decode("utf-8", "replace")
            self._files[path] = _classes(source)
        if name not in self._files[path]:
            raise self._error(f"its code lacks the class {module.class_name[:120]!r}")
        return self._files[path][name]

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._archive.origin}: {what}; save its state dict with torch.save instead")


def _classes(source: str) -> dict[str, _Class]:
    classes: dict[str, _Class] = {}
    name = ""  # of the class that the line is in
    for line in source.split("\n"):
        if match := _CLASS.fullmatch(line):
            name = match[1]
            classes[name] = _Class(module=match[2] == "Module")
        elif line[:1].strip():
            name = ""
        elif name and (match := _NAMES.fullmatch(line)):
            names = tuple(_NAME.findall(match[2]))
            known = classes[name]
            is_parameters = match[1] == "parameters"
            classes[name] = (
                replace(known, parameters=names) if is_parameters else replace(known, buffers=names)
            )
    return classes
