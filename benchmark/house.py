"""Size of the code base: `python -m benchmark.house [--live]`. Prints the figures that docs/adr/0024-size.md limits.

The static rows come from the syntax trees of `chitu/` and `test/`. `--live` starts the default cluster (a router, one
prefill and one decode instance with the embedded model), streams one chat request after a warm-up and counts the
functions of `chitu/` that run in any of the three processes between the request and its first token. Functions that
also run while the cluster is idle (heartbeats, polling) are left out; comprehensions and lambdas count with their
function.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import httpx

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries

ROOT = Path(__file__).resolve().parent.parent
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RECORD_BASES = {"Struct", "NamedTuple", "TypedDict"}
ROLE_PARTS = {"sender", "receiver", "fan_out", "tiers", "kv", "side", "transfer"}
RECORD_FIELDS, CONSTRUCTOR_ARGUMENTS, SMALL_CLASS_LINES, LONG_LINES = 6, 6, 10, 80
IDLE_S = 4.0
"""Time within which an idle cluster runs all of its heartbeats, views and polls."""
TRACER = """
import json, os, sys, threading
folder = os.environ["CHITU_HOUSE"]
seen = {}
def note(frame, event, _):
    if event == "call" and frame.f_code not in seen and "/chitu/" in frame.f_code.co_filename:
        seen[frame.f_code] = frame.f_code.co_qualname
def dump(phase):
    seen_now, names = list(seen.items()), []
    seen.clear()
    for code, name in seen_now:
        if not name.endswith(">"):
            names.append(f"{code.co_filename.rpartition('/chitu/')[2]}:{name}")
    path = f"{folder}/{phase}.{os.getpid()}"
    with open(path + ".new", "w") as file:
        json.dump(names, file)
    os.rename(path + ".new", path)
def wait():
    for phase in ("start", "idle", "request"):
        tick = threading.Event()
        while not os.path.exists(f"{folder}/{phase}"):
            tick.wait(0.005)
        dump(phase)
if any(entry in " ".join(sys.orig_argv) for entry in ("chitu.serve.api_server", "chitu.serve.scheduler")):
    threading.Thread(target=wait, daemon=True).start()
    threading.setprofile(note)
    sys.setprofile(note)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="count the functions on the way to token 1 as well")
    parser.add_argument("--list", action="store_true", help="with --live: print them")
    args = parser.parse_args()
    for name, figure in static_rows():
        print(f"{name:<58}{figure}")
    if args.live:
        functions = functions_to_token_1()
        files = {name.partition(":")[0] for names in functions.values() for name in names}
        distinct = set().union(*functions.values())
        each = ", ".join(f"{process} {len(names)}" for process, names in functions.items())
        print(f"{'functions to token 1':<58}{len(distinct)} ({each}) in {len(files)} files")
        if args.list:
            for process, names in functions.items():
                print(f"\n{process}", *sorted(names), sep="\n  ")


def static_rows() -> Iterator[tuple[str, str]]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "chitu").rglob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    yield "lines of chitu/", f"{_lines('chitu'):,}"
    yield "lines of test/", f"{_lines('test'):,}"
    yield "top-level files of the package", str(len(list((ROOT / "chitu").glob("*.py"))))
    yield "import cycles", _cycle(trees) or "0"
    arguments = sorted((_constructor_arguments(node), node.name) for node in classes)
    above = sum(number > CONSTRUCTOR_ARGUMENTS for number, _ in arguments)
    yield (
        "constructor arguments, most",
        f"{arguments[-1][0]} ({arguments[-1][1]}); {above} above {CONSTRUCTOR_ARGUMENTS}",
    )
    records = [fields for node in classes if (fields := _record_fields(node))]
    yield f"records of more than {RECORD_FIELDS} fields", str(sum(number > RECORD_FIELDS for number in records))
    small = sum((node.end_lineno or 0) - node.lineno < SMALL_CLASS_LINES for node in classes)
    yield f"classes; of {SMALL_CLASS_LINES} lines or less", f"{len(classes)}; {small}"
    twice = sorted(name for name, number in Counter(n.name for n in classes if n.name[0] != "_").items() if number > 1)
    yield "public class names that occur twice", f"{len(twice)} {' '.join(twice)}"
    functions = [n for t in trees.values() for n in ast.walk(t) if isinstance(n, DEFINITIONS[1:])]
    long = sum((node.end_lineno or 0) - node.lineno >= LONG_LINES for node in functions)
    yield f"functions of more than {LONG_LINES} lines", str(long)
    yield "constants and loggers below the first definition", str(sum(map(_low_constants, trees.values())))
    yield "`Callable[`", str(sum(path.read_text(encoding="utf-8").count("Callable[") for path in trees))
    tests = [node for path in trees if _knows_roles(path) for node in ast.walk(trees[path]) if _is_role_test(node)]
    yield "`is None` of what only some roles have", str(len(tests))
    yield "`assert ... is not None`", str(sum(_is_none_assert(node) for t in trees.values() for node in ast.walk(t)))


def _lines(folder: str) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def _constructor_arguments(node: ast.ClassDef) -> int:
    """Return the number of arguments without `self`, or 0 if the class has no constructor of its own."""
    for made in node.body:
        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
            return len(made.args.posonlyargs) + len(made.args.args) + len(made.args.kwonlyargs) - 1
    return 0


def _record_fields(node: ast.ClassDef) -> int:
    """Return the number of fields of a dataclass, struct or named tuple, or 0 for any other class."""
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    if "dataclass" not in decorators and not bases & RECORD_BASES:
        return 0
    return sum(isinstance(field, ast.AnnAssign) for field in node.body)


def _low_constants(tree: ast.Module) -> int:
    """Return how many constants and loggers of a module stand below its first definition."""
    first = next((at for at, node in enumerate(tree.body) if isinstance(node, DEFINITIONS)), len(tree.body))
    found = [node for node in tree.body[first:] if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [node.targets[0] if isinstance(node, ast.Assign) else node.target for node in found]
    return sum(isinstance(x, ast.Name) and (x.id.isupper() or x.id in ("log", "logger")) for x in targets)


def _knows_roles(path: Path) -> bool:
    """Return whether the names in `ROLE_PARTS` mean these parts in a file; in others a `sender` is that of a link."""
    return path.name != "token_manager.py" and path.parent.name != "net"


def _is_role_test(node: ast.AST) -> bool:
    """Return whether a comparison asks for a part that only instances of some roles have."""
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        return False
    name = ast.unparse(node.left).rpartition(".")[2].lstrip("_")
    return name in ROLE_PARTS and ast.unparse(node.comparators[0]) == "None"


def _is_none_assert(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)


def _cycle(trees: dict[Path, ast.Module]) -> str:
    """Return one import cycle at module level, without type-checking imports, or "" if there is none."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in trees}
    modules = set(names.values())
    graph: dict[str, set[str]] = {}
    for path, tree in trees.items():
        found = graph.setdefault(names[path], set())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {
                    name if (name := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
                } & modules
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & modules
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def functions_to_token_1() -> dict[str, set[str]]:
    """Return by process the functions that ran for one request and not while the cluster was idle."""
    with tempfile.TemporaryDirectory(prefix="chitu-house-") as folder:
        Path(folder, "sitecustomize.py").write_text(TRACER, encoding="utf-8")
        env = {"CHITU_HOUSE": folder, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        topology = load_topology("pd_disagg_1p1d_local", [f"model.path={TINY_MODEL_DIR}"])
        with LocalCluster(topology, env=env, entries=Entries(torchrun=False)) as cluster:
            cluster.wait_ready()
            list(_tokens(cluster.url))  # to its end, so that nothing of it runs in the idle phase
            _phase(folder, "start")
            time.sleep(IDLE_S)
            idle = _phase(folder, "idle")
            next(_tokens(cluster.url))
            request = _phase(folder, "request")
            processes = {str(cluster.pid(name)): name for name in ("router", "P0", "D0")}
    return {name: request[pid] - idle[pid] for pid, name in processes.items()}


def _tokens(url: str) -> Iterator[str]:
    """Send a chat request and yield the events that have text as they arrive."""
    body = {"messages": [{"role": "user", "content": "What is next?"}], "max_tokens": 16, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if '"content":"' in line.replace(" ", "") and '"content":""' not in line.replace(" ", ""):
                yield line


def _phase(folder: str, phase: str) -> dict[str, set[str]]:
    """End a phase and return by process id the functions that ran in it."""
    Path(folder, phase).touch()
    time.sleep(1)
    return {path.suffix[1:]: set(json.loads(path.read_text())) for path in Path(folder).glob(f"{phase}.*[0-9]")}


if __name__ == "__main__":
    main()
