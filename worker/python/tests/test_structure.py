"""The package's modules import each other in one direction. An import for types alone counts as well."""

import ast
import pathlib

import longshore

_FOLDER = pathlib.Path(longshore.__file__).parent


def test_no_module_imports_itself_by_way_of_others() -> None:
    imports = {path.stem: _imported(path) for path in _FOLDER.glob("*.py")}
    assert len(imports) > 60, "the modules were not found"
    while imports:
        # Whoever imports none of those that are left is in no circle.
        free = [name for name, others in imports.items() if not others & imports.keys()]
        assert free, _circle(imports)
        for name in free:
            del imports[name]


def _circle(imports: dict[str, set[str]]) -> str:
    """One of the circles among modules each of which imports another."""
    way = [min(imports)]
    while way.count(way[-1]) < 2:
        way.append(min(imports[way[-1]] & imports.keys()))
    return " imports ".join(way[way.index(way[-1]) :])


def _imported(path: pathlib.Path) -> set[str]:
    """The package's own modules that a module names in an import, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: write from longshore import ..."
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
            names.add(str(node.module))
    return {_module(name) for name in names if name.startswith("longshore.")}


def _module(name: str) -> str:
    """Its file. What is in no file of its own, as ``longshore.AdamW``, is in the package's."""
    first = name.split(".")[1]
    return first if any((_FOLDER / f"{first}{end}").exists() for end in (".py", ".pyi")) else "__init__"
