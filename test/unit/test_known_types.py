"""Types that threads read first at the same time: `known` is safe, and every place that reads one names it so."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import chitu

FOLDER = Path(chitu.__file__).parent
PLAIN = ("list", "dict", "str", "int", "Raw")
"""Types of msgspec and Python, of which nothing is collected at first use."""
TYPES = """
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    a: int = 0
    b: list[int] = []
class Middle(msgspec.Struct):
    inner: Inner | None = None
    many: list[Inner] = []
class Outer(msgspec.Struct):
    middle: Middle | None = None
    inner: dict[str, Inner] = {}
"""
RACE = f"""
import sys, threading, types, msgspec
from chitu.known_types import known
sys.setswitchinterval(1e-6)
value = {{"middle": {{"inner": {{"a": 1}}, "many": [{{"b": [1]}}]}}, "inner": {{"x": {{}}}}}}
for number in range(100):
    made = sys.modules[f"made{{number}}"] = types.ModuleType(f"made{{number}}")
    exec({TYPES!r}, made.__dict__)
    kind, start = made.Outer, threading.Barrier(8)
    def read():
        start.wait()
        msgspec.convert(value, known(kind))
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def unknown(module: ast.Module) -> Iterator[str]:
    """Yield the types that functions read without `known`."""
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if not ast.unparse(call.func).startswith("msgspec."):
                continue
            if call.func.attr == "convert":
                kinds = call.args[1:2]
            else:
                kinds = [each.value for each in call.keywords if each.arg == "type" and call.func.attr == "decode"]
            for kind in kinds:
                words = {each.id for each in ast.walk(kind) if isinstance(each, ast.Name)}
                if "known" not in words and not words & {*PLAIN, "msgspec", "Any"}:
                    yield ast.unparse(kind)


def test_threads_that_read_a_new_type_at_the_same_time_all_do() -> None:
    """Without `known` the process dies of SIGSEGV each time."""
    found = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(): msgspec.json.decode(a, type=Record)", ["Record"]),
        ("def f(): msgspec.convert(a, Record)", ["Record"]),
        ("def f(): msgspec.json.decode(a, type=known(Record))", []),
        ("def f(): msgspec.json.decode(a, type=dict[str, msgspec.Raw])", []),
        ("_decoder = msgspec.json.Decoder(Record)", []),
    ],
)
def test_a_type_that_is_read_without_being_known_is_found(code: str, found: list[str]) -> None:
    assert list(unknown(ast.parse(code))) == found


def test_every_type_that_a_function_reads_is_known() -> None:
    found = {
        str(path.relative_to(FOLDER)): names
        for path in sorted(FOLDER.rglob("*.py"))
        if (names := list(unknown(ast.parse(path.read_text()))))
    }
    assert not found, f"write type=known(...) (chitu/known_types.py): {found}"
