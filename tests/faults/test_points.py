"""The list of fault points and the code agree, and every await of the producer has its point."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

from runtime.faults.points import FILE_POINTS, POINTS

ROOT = Path(__file__).parents[2] / "runtime"
CALL = re.compile(r'(?:faults\.plan\.(?:reach|pause|now)|_lossy)\(\s*"([a-z_.]+)"')

PRODUCER_ROOM = ("producer", "calls", "flight", "requests", "gate")
EXEMPT = {
    # They only pass an await on to a function below them that has a point of its own.
    "Producer.run": "waits for its tasks: producer.admit, producer.tick",
    "GenerationCalls._send": "awaits _ask: generation.request",
    "AdmissionGate._drained_within": "awaited by close: gate.close",
    "AdmissionGate._expire": "the other side of _drained_within",
    "run": "inner function of gather: group.gather",
    "EvaluationAdmission.call": "a place in a limiter, no state of ours",
}


def found(where: str) -> FunctionType:
    module, _, name = where.partition(":")
    value = importlib.import_module(module)
    for part in name.split("."):
        value = inspect.getattr_static(value, part)
    value = inspect.unwrap(value)
    assert isinstance(value, FunctionType), where
    return value


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.name)
def test_function_of_the_list_has_its_point(point) -> None:
    assert point.name in CALL.findall(inspect.getsource(found(point.where)))


@pytest.mark.parametrize("point", FILE_POINTS, ids=lambda p: f"{p.name} {p.where}")
def test_file_operation_of_the_list_has_its_point(point) -> None:
    operation = point.name.partition(".")[2]
    source = inspect.getsource(found(point.where))
    assert re.search(rf'\bpoint\("{operation}"', source), source


def test_code_has_no_point_that_is_not_on_the_list() -> None:
    listed = {point.name for point in POINTS}
    in_code = {
        name
        for path in ROOT.rglob("*.py")
        if path.parent.name != "faults"
        for name in CALL.findall(path.read_text())
    }
    assert in_code == listed
    assert len(listed) == len(POINTS)


@pytest.mark.parametrize("module", PRODUCER_ROOM)
def test_every_await_of_the_producer_has_a_point(module: str) -> None:
    tree = ast.parse((ROOT / "rollout" / f"{module}.py").read_text())
    without = [
        name
        for name, function in functions(tree)
        if waits(function) and name not in EXEMPT and "faults" not in ast.unparse(function)
        and "_lossy" not in ast.unparse(function)
    ]  # fmt: skip
    assert without == []


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from functions(child)
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{child.name}.")
        else:
            yield from functions(child, prefix)


def waits(function: ast.AsyncFunctionDef) -> bool:
    """It awaits something itself; what an inner function awaits is that one's matter."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        todo.extend(ast.iter_child_nodes(node))
    return False


def test_the_awaits_are_told_apart() -> None:
    tree = ast.parse(
        textwrap.dedent(
            """
            class A:
                async def waits(self):
                    await x()
                async def lets_another_wait(self):
                    async def inner():
                        await x()
                    start(inner)
            """
        )
    )
    assert [(n, waits(f)) for n, f in functions(tree)] == [
        ("A.waits", True),
        ("A.lets_another_wait", False),
        ("inner", True),
    ]
