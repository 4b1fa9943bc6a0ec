"""Every GPU performance target in one run, measured against the ceilings of the same device: `chitu bench gpu`.

Ceilings first (copy, matrix product, scattered copy); then decode attention, whole decode steps and prefills of a model
of Qwen3-0.6B's shape with random weights, a recorded chunk beside recorded decodes, KV into another process's pool,
1P1D beside a unified instance over HTTP, and its hops from P's logits to D's token; then larger shapes, and 1P1D of one
of them without `cache.num_pages`.
Takes at most `--minutes`; a part that cannot run is reported with its reason.

    chitu bench gpu                       on a GPU, everything
    chitu bench gpu --only attention,steps
    chitu bench gpu --device cpu --tiny   without a GPU: shows that the benchmark works; its figures mean nothing
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chitu.errors import ConfigError
from chitu.tools.bench.report import DEFAULT_DIR, publish

if TYPE_CHECKING:
    from chitu.tools.bench.gpu.card import Card, Row


PARTS = ("attention", "steps", "lanes", "transfer", "served", "hops", "shapes", "budget")
DEFAULT_SHAPES = "8b,8b-fp8,30b-a3b"


def make_checkpoint(card: Card, folder: Path) -> Path:
    """Write random weights of the model's shape, and a tokenizer in which every token has a text, so that each token is
    an event of its own in a stream."""
    import msgspec

    from chitu.tools.make_model import make_model

    make_model(folder, "qwen3", card.sizes.model)
    path = folder / "tokenizer.json"
    tokenizer = msgspec.json.decode(path.read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    known = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary.update({f"w{token}": token for token in range(card.sizes.model.vocab_size) if token not in known})
    path.write_bytes(msgspec.json.encode(tokenizer))
    return folder


def measure(
    card: Card, parts: tuple[str, ...], folder: Path, end_s: float, child: list[str], names: Sequence[str]
) -> Iterator[Row | str]:
    """Yield rows, and a line of text for each part that could not be measured. `names`: of shapes."""
    from chitu.tools.bench.gpu import budget, hops, lanes, scatter, served, shapes
    from chitu.tools.bench.gpu.kernels import attention, ceilings
    from chitu.tools.bench.gpu.steps import StepBench

    def of_steps() -> Iterator[Row]:
        return StepBench.of_folder(card, make_once()).rows()

    def of_lanes() -> Iterator[Row]:
        return lanes.rows(card, StepBench.of_folder(card, make_once()))

    def of_shapes() -> Iterator[Row]:
        for name in names:
            yield from shapes.rows(card, name)
            card.release()

    def make_once() -> Path:
        model = folder / "model"
        return model if model.exists() else make_checkpoint(card, model)

    runs: dict[str, Callable[[], Iterator[Row | str] | Iterator[Row]]] = {
        "attention": lambda: attention(card),
        "steps": of_steps,
        "transfer": lambda: scatter.rows(card, child),
        "served": lambda: served.rows(card, make_once()),
        "hops": lambda: hops.rows(card, make_once()),
        "shapes": of_shapes,
        "budget": lambda: budget.rows(card, folder / "zeros", names[0]),
        "lanes": of_lanes,
    }
    yield from ceilings(card)
    for part in parts:
        if time.monotonic() > end_s:
            yield f"{part}: not run, the time was up"
            continue
        try:
            yield from runs[part]()
        except Exception as error:  # Triton's errors have no common base; report the failed part and run the others
            yield f"{part}: {type(error).__name__}: {error}"
        card.release()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="sizes that Triton's interpreter can do")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, comma separated")
    parser.add_argument(
        "--shape",
        default=DEFAULT_SHAPES,
        help="models of the part `shapes`, of 0.6b, 8b, 30b-a3b, with `-fp8` behind, and gpt-oss-20b",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="no part begins after six sevenths of it")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    parts = tuple(part for part in arguments.only.split(",") if part)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    names = tuple(filter(None, arguments.shape.split(",")))
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which may be by torch

    import torch

    from chitu.tools.bench.gpu.card import COLUMNS, FULL, TINY, Card

    if arguments.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; `--device cpu --tiny` shows that the benchmark works")
    card = Card(torch.device(arguments.device), TINY if arguments.tiny else FULL)
    if arguments.receive:
        from chitu.tools.bench.gpu.scatter import receive

        receive(card, arguments.receive)
        return 0
    child = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    end_s = time.monotonic() + arguments.minutes * 60 * 6 / 7
    rows: list[Row] = []
    failures: list[str] = []
    print(f"{card.name}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for found in measure(card, parts, Path(scratch), end_s, child, names):
            if isinstance(found, str):
                failures.append(found)
                print(f"NOT MEASURED {found}", flush=True)
            else:
                rows.append(found)
                print("  ".join(str(cell) for cell in found.cells()), flush=True)
    publish("gpu", COLUMNS, [row.cells() for row in rows], arguments.json_dir, card.name)
    for failure in failures:
        print(f"NOT MEASURED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
