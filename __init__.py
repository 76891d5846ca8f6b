"""Make ``import clipkit`` work in the folder above a clone that is called clipkit.

Python would take the clone for a namespace package without content. This file hands over to the package that is
installed or on the path, if there is one, and to the clone's own package otherwise.
"""

if __name__ == "clipkit":
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    _others = [
        folder for folder in sys.path if not Path(folder, "clipkit", "clipkit", "__init__.py").is_file()
    ]
    _spec = PathFinder.find_spec(__name__, [*_others, str(Path(__file__).absolute().parent)])
    assert _spec is not None and _spec.loader is not None
    sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
