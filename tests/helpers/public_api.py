"""What is public, as the text of a stub: names, arguments and defaults of everything that the reference documents.

PYTHONPATH=tests python -m helpers.public_api >public_api.pyi && mv public_api.pyi tests
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedmoe_pl.version import __version__

REFERENCE = Path(__file__).parents[2] / "docs/reference"
# the package makes these for its users, so their attributes are promised, and the order of arguments is not
_GIVEN = {"Client", "ClientEvaluation", "Evaluation", "Run"}
_DIRECTIVE = re.compile(r"^\.\. auto(module|class|function):: (\S+)(\n +:no-members:)?", re.MULTILINE)


def documented() -> dict[str, dict[str, bool]]:
    """The documented names of each module, without those that a page calls provisional, and whether with members."""
    names = dict[str, dict[str, bool]]()
    for page in sorted(REFERENCE.glob("*.md")):
        promised = page.read_text().partition("\n## Provisional")[0]
        for kind, path, without_members in _DIRECTIVE.findall(promised):
            if kind == "module":
                names.setdefault(path, {}).update(dict.fromkeys(importlib.import_module(path).__all__, True))
            else:
                module, _, name = path.rpartition(".")
                names.setdefault(module, {})[name] = not without_members
    return {module: dict(sorted(names[module].items())) for module in sorted(names)}


def stub() -> str:
    """The stub: a class for each module, because all of them are one file."""
    names = documented()
    public = {
        module: {name: getattr(importlib.import_module(module), name) for name in names[module]} for module in names
    }
    classes = {each for objects in public.values() for each in objects.values() if inspect.isclass(each)}
    lines = [f"# fedmoe_pl {__version__}"]
    for module, objects in public.items():
        lines += ["", f"class {module.replace('.', '_')}:"]
        for name, each in objects.items():
            is_class = inspect.isclass(each)
            shown = _class(name, each, classes, names[module][name]) if is_class else _function(name, each)
            lines += [f"    {line}" for line in shown]
    return "\n".join(lines) + "\n"


def _class(name: str, of: type, public: set[type], with_members: bool) -> Iterator[str]:
    """A class with its constructor, and with what it or a class that is not public defines."""
    yield f"class {name}:"
    fields = {*inspect.signature(of).parameters} if name in _GIVEN else set[str]()
    yield from (f"    {field} = ..." for field in sorted(fields))
    if not fields:
        yield f"    def __init__({_arguments(of, 'self')}): ..."
    for member in sorted({each for each in dir(of) if with_members and not each.startswith("_")} - fields):
        owner = next((each for each in of.__mro__ if _defines(each, member)), None)
        if owner is None or not owner.__module__.startswith("fedmoe_pl") or (owner in public and owner is not of):
            continue
        found = inspect.getattr_static(of, member)
        call = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        yield from (f"    {line}" for line in _function(member, call))


def _defines(of: type, member: str) -> bool:
    """Whether a class has a member of its own; torch copies an inherited ``step`` to the class of each optimizer."""
    found = vars(of).get(member)
    is_copied = hasattr(found, "hooked") and of.__qualname__ not in getattr(found, "__qualname__", "").split(".")
    return member in vars(of) and not is_copied


def _function(name: str, each: Any) -> Iterator[str]:
    """A function, or a name with a value."""
    yield f"def {name}({_arguments(each)}): ..." if inspect.isfunction(each) else f"{name} = ..."


def _arguments(call: Callable[..., Any], *first: str) -> str:
    """The names of arguments with their defaults; what is no literal is three dots."""
    signature = inspect.signature(call)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    shown = [
        parameter.replace(default=_Default(parameter.default))
        if parameter.default is not parameter.empty
        else parameter
        for parameter in parameters
    ]
    text = str(signature.replace(parameters=shown, return_annotation=signature.empty))[1:-1]
    return ", ".join([*first, *([text] if text else [])])


class _Default:
    """A default as a stub has it."""

    def __init__(self, value: object) -> None:
        self.text = repr(value)
        try:
            ast.literal_eval(self.text)
        except (ValueError, SyntaxError):
            self.text = "..."

    def __repr__(self) -> str:
        return self.text


if __name__ == "__main__":
    print(stub(), end="")
