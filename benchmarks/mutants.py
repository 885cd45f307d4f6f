"""Breaks the package in random places, one at a time, and tells which breaks the tests catch.

``python benchmarks/mutants.py 10 --seed 1 --under fedmoe_pl/aggregation`` works on a copy of the tree. For each break
it runs the doctests of the broken module and the tests that import the module's names, or lie in a folder of the
module's name, those that mention it most often first.
"""

# pyright: reportAttributeAccessIssue=false

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}


def changed(node) -> ast.AST | None:
    """The node, broken; None if it is not of a kind to break."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHERS:
        return ast.Compare(node.left, [OTHERS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OTHERS:
        return ast.BinOp(node.left, OTHERS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(OTHERS[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
        return ast.Return(ast.Constant(None))
    return None


def places(path: Path) -> list[tuple[Path, ast.AST, ast.AST]]:
    """All breaks of one line in a module's functions; annotations and f-strings are left alone."""
    found, todo = [], [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        new = changed(node)
        if new and node.lineno == node.end_lineno:
            found.append((path, node, new))
        todo += [
            child
            for name, value in ast.iter_fields(node)
            if name not in ("annotation", "returns")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
    return found


def tests_of(module: Path, tree: Path, most: int) -> list[str]:
    """The tests that import the names of a module's top level, or of the module."""
    names = [
        node.name for node in ast.parse(module.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    words = re.compile(rf"\b({'|'.join([module.stem, *names])})\b")
    scores = {}
    for path in (tree / "tests").rglob("test_*.py"):
        if ("deployment" in path.parts and "deployment" not in module.parts) or path.name == "test_trees.py":
            continue
        score = len(words.findall(path.read_text())) + 3 * (path.stem == f"test_{module.stem}")
        if score or path.parent.name == module.parent.name:
            scores[path] = score + 2 * (path.parent.name == module.parent.name)
    chosen = sorted(scores, key=lambda path: (-scores[path], path))[:most]
    return [str(path.relative_to(tree)) for path in chosen]


def main():
    """Prints a line for each break: caught, lived or timeout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="fedmoe_pl")
    parser.add_argument("--files", type=int, default=12, help="the most test files that are run for a break")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that the tests of a break may take")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", "docs/build"))
        every = [place for path in sorted((tree / arguments.under).rglob("*.py")) for place in places(path)]
        for path, node, new in random.Random(arguments.seed).sample(every, arguments.number):
            source = path.read_text()
            lines = source.encode().splitlines(keepends=True)
            line, text = lines[node.lineno - 1], ast.unparse(new).encode()
            text = text if isinstance(new, ast.Return) else b"(" + text + b")"
            lines[node.lineno - 1] = line[: node.col_offset] + text + line[node.end_col_offset :]
            path.write_bytes(b"".join(lines))
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
            command += [str(path.relative_to(tree)), *tests_of(path, tree, arguments.files)]
            try:
                environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
                done = subprocess.run(
                    command, cwd=tree, env=environment, timeout=arguments.timeout, capture_output=True, text=True
                )
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
                outcome = f"caught by {failed[0]}" if failed else "caught" if done.returncode else "LIVED"
            except subprocess.TimeoutExpired:
                outcome = "timeout"
            path.write_text(source)
            place = f"{path.relative_to(tree)}:{node.lineno}"
            print(f"{place}: {ast.unparse(node)[:60]} -> {ast.unparse(new)[:60]}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
