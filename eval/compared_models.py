"""Which two models of some results a user means: by name, label, hash, results file, run folder or checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from clipkit.errors import ConfigError, DataError, nearest
from eval.dataset import some
from eval.report.model_identity import is_of_checkpoint, named_checkpoint, normal_name
from eval.report.result_set import Model, ResultSet, read_result_set

__all__ = ["find_models"]

_LEAST_DIGITS = 6  # of a hash, to name weights by how they begin
_FORM = "`compare MODEL_A MODEL_B --results FILE`"
_HOW = f"name one as {_FORM}"


def find_models(
    results: Sequence[Path], first: str, second: str
) -> tuple[list[Path], ResultSet, tuple[int, int], list[str]]:
    """Read the scores of two models.

    Args:
        results: ``results.jsonl`` files; what the names themselves say comes to them.
        first: a model, as ``compare`` takes it.
        second: another.

    Returns:
        All files, what is in them, the numbers of the two models, and notes for who reads the comparison.

    Raises:
        ConfigError: there is no such model or file, several have the name, or both are the same.
        DataError: a file cannot be read, or has no scores.
    """
    known = read_result_set(results).models if results else ()
    paths: list[Path | None] = []
    files = list(results)
    for name in (first, second):
        there = any(_goes_by(model, name) for model in known)
        of_run = _results_of_run(name)
        # a checkpoint is scored into the results of its run, which has others too
        paths.append(None if there or of_run else _file(name))
        files += [] if there else [one for one in (of_run, paths[-1]) if one is not None]
    files = list(dict.fromkeys(files))
    if not files:
        raise ConfigError(f"{first!r} is no results file and no run folder: for a model's name say {_FORM}")
    found = read_result_set(files)
    notes = list(found.unread)
    one, other = (_model(found, *pair, notes) for pair in zip((first, second), paths, strict=True))
    if one == other:
        raise ConfigError(f"{first!r} and {second!r} are the same model: name two")
    return files, found, (one, other), notes


def _results_of_run(name: str) -> Path | None:
    """The results file of the run whose checkpoint is named; None where it is none, or has no results."""
    path = Path(normal_name(name)) / "results.jsonl"
    try:
        return path if named_checkpoint(name) and path.is_file() else None
    except (OSError, ValueError):
        return None


def _file(name: str) -> Path | None:
    """The results file that is named, or that lies in the run folder that is named; None where it is neither.

    Raises:
        ConfigError: it should be there, and is not.
    """
    path = Path(name)
    try:
        if path.is_dir():
            path = path / "results.jsonl"
            if not path.is_file():
                raise ConfigError(f"no results at {path}: score the model by `python -m eval run`")
            return path
        if path.suffix != ".jsonl":
            return None
        if not path.is_file():
            raise ConfigError(f"there is no file {name[:200]}")
    except OSError as error:
        raise ConfigError(f"cannot read {name[:200]}: {error.strerror}") from error
    return path


def _model(found: ResultSet, name: str, path: Path | None, notes: list[str]) -> int:
    """The number of a model; of several steps of one training the last.

    Raises:
        ConfigError: there is none, or several.
    """
    models = found.models
    if path is not None:
        matches = [i for i, model in enumerate(models) if path in model.files]
    else:
        matches = [i for i, model in enumerate(models) if name in (model.label, model.weights, *model.names)]
        matches = matches or [i for i, model in enumerate(models) if _goes_by(model, name)]
    labels = ", ".join(models[i].label for i in matches)
    if len({models[i].run for i in matches}) == 1 and not named_checkpoint(name):
        steps = {step for i in matches for step in (models[i].step, *models[i].earlier_steps)}
        of = sorted(step for step in steps if step is not None)
        last = [i for i in matches if None not in steps and models[i].step == of[-1]]
        if len(last) == 1 and len(of) > 1:
            shown = some([f"{step:,}" for step in of])
            notes.append(f"{path or name} has scores of steps {shown}: the last is compared")
        matches = last or matches
    if len(matches) == 1:
        return matches[0]
    if path is not None and not matches:
        raise DataError(f"there are no scores in {path}")
    if path is not None:
        how = _HOW.replace("FILE", str(path))
        raise ConfigError(f"{path} holds several models ({labels}): {how}")
    if matches:
        raise ConfigError(f"{name!r} is several models: name one of {labels}, as {_FORM}")
    if named_checkpoint(name) and any(normal_name(name) in model.names for model in models):
        raise ConfigError(
            f"no scores of the checkpoint {name!r}: score it by `python -m eval run --model {name}`"
        )
    known = nearest(name, [model.label for model in models])
    raise ConfigError(f"no results of a model {name!r}, and no such file or run folder: {known}")


def _goes_by(model: Model, name: str) -> bool:
    """Whether a name means a model; that of a checkpoint means it alone, not others of its run."""
    checkpoint = named_checkpoint(name)
    if checkpoint and not is_of_checkpoint(checkpoint, model.step, model.names):
        return False
    start = name.removeprefix("sha256:")
    begins = len(start) >= _LEAST_DIGITS and model.weights.removeprefix("sha256:").startswith(start)
    return name == model.label or normal_name(name) in model.names or begins
