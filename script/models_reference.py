"""Write the tables of docs/models.md from the list of checkpoints: `python script/models_reference.py`. A test fails if
they are out of date.

The list is `test/support/checkpoints.py`; a test compares the logits of each row that loads. What a row says beside
that is what `read_model_spec` reads from its config.json, and whether its modules can be cut for two ranks. The text
around the tables is written by hand.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test"))

import torch  # noqa: E402
from support.checkpoints import ROWS, Row, write_row_config  # noqa: E402

from chitu.errors import ConfigError  # noqa: E402
from chitu.models.config import ModelSpec, read_model_spec  # noqa: E402
from chitu.models.generic.filling import TextParts  # noqa: E402
from chitu.models.generic.library import library_version  # noqa: E402
from chitu.models.generic.model import empty_model  # noqa: E402
from chitu.models.generic.sharding import Sharding  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- generated: {} -->\n", "<!-- end -->\n"


class Served(NamedTuple):
    row: Row
    spec: ModelSpec


class OneOfTwo:
    """A `Shard` that is asked for nothing but its place."""

    rank, size = 0, 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather_columns(self, x_RC: torch.Tensor, widths: object) -> torch.Tensor:
        raise NotImplementedError

    def broadcast(self, x: torch.Tensor) -> NoReturn:
        raise NotImplementedError


def main() -> None:
    PAGE.write_text(reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def reference(page: str) -> str:
    """Return the page with new tables between its marks."""
    served, refused = [], []
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            write_row_config(row, Path(folder))
            try:
                served.append(Served(row, read_model_spec(folder)))
            except ConfigError as error:
                says = error.message.partition("config.json: ")[2] or error.message
                refused.append((row, says.replace(f"transformers {library_version()}", "transformers")))
    page = _replaced(page, "served", "".join(_served(served)))
    return _replaced(page, "refused", "".join(_refused(refused)))


def _replaced(page: str, name: str, table: str) -> str:
    before, begin, rest = page.partition(BEGIN.format(name))
    _, end, after = rest.partition(END)
    assert begin and end, f"docs/models.md has no marks of the table {name!r}"
    return f"{before}{begin}{table}{end}{after}"


def _served(served: list[Served]) -> Iterator[str]:
    yield (
        "| `architectures` | computed by | weights | kept of a request | ranks | checkpoints of the list |\n"
        "|---|---|---|---|---|---|\n"
    )
    for architecture, code in dict.fromkeys((each.spec.architecture, each.spec.code) for each in served):
        same = [each for each in served if (each.spec.architecture, each.spec.code) == (architecture, code)]
        forms = dict.fromkeys(each.spec.quantization.words if each.spec.quantization else "plain" for each in same)
        kept = dict.fromkeys(kind for each in same for kind in _kept(each.spec))
        names = [each.row.name + (" (text)" if each.spec.is_text_part else "") for each in same]
        ranks = "any" if code == "own" or _can_be_cut(same[0]) else "1"
        yield (
            f"| `{architecture}` | {code} | {', '.join(forms)} | {', '.join(kept)} | {ranks} | {', '.join(names)} |\n"
        )


def _can_be_cut(served: Served) -> bool:
    """Return whether the modules of transformers can be cut, from an empty model."""
    with tempfile.TemporaryDirectory() as folder:
        write_row_config(served.row, Path(folder))
        parts = TextParts(empty_model(folder, served.spec, torch.float32))
    try:
        Sharding(parts.decoder, f"{parts.decoder_name}.", served.spec, OneOfTwo())
    except ConfigError:
        return False
    return True


def _kept(spec: ModelSpec) -> Iterator[str]:
    """Yield what the layers keep of a request."""
    if spec.latent is not None:
        yield "latent rows and index keys" if len(spec.groups[0].head_dims) > 1 else "latent rows"
    else:
        yield "K and V" + (" (windows)" if any(group.window for group in spec.groups) else "")
    if spec.state:
        yield "state"


def _refused(refused: list[tuple[Row, str]]) -> Iterator[str]:
    yield "| checkpoint | the error says |\n|---|---|\n"
    for row, says in refused:
        yield f"| {row.name} | {says} |\n"


if __name__ == "__main__":
    main()
