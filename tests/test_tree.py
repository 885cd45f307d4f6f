"""The parts of the package import downwards only, and no two modules import each other."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import fedmoe_pl

PACKAGE = Path(fedmoe_pl.__file__).parent
# Each part may import from itself and from those before it, and parts in one line of the list from each other.
PARTS = (
    "version",
    "seeds",
    "trees",
    "checks",
    "data",
    "models",
    "algorithms",
    "aggregation",
    "backends",
    "phases",
    "evaluation checkpoints",
    "logs",
    "rounds",
    "setup",
    "commands",
    "callbacks",
    "deployment",
    "federation",
    "catalogue",
    "report",
    "grids",
    "cli",
    "__main__",
)
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


@cache
def imports(module: str) -> dict[str, int]:
    """The package's modules that a module imports anywhere, also for types alone, and the column of the statement."""
    found = {}
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedmoe_pl"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("fedmoe_pl")]
        else:
            continue
        found |= dict.fromkeys(names, node.col_offset)
    return found


def part(module: str) -> int:
    return next(rank for rank, names in enumerate(PARTS) if module.split(".")[1] in names.split())


def test_a_module_imports_from_its_own_part_or_from_those_below():
    for module in MODULES:
        for imported, column in imports(module).items():
            if imported != "fedmoe_pl" and imported.split(".")[1] in " ".join(PARTS).split():
                assert part(imported) <= part(module), f"{module} imports {imported}"
            assert column == 0, f"{module} imports {imported} inside a block"


def test_no_module_is_part_of_a_circle():
    graph = {module: [name for name in imports(module) if name in MODULES] for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_every_module_belongs_to_a_part():
    assert {module.split(".")[1] for module in MODULES} == set(" ".join(PARTS).split())
