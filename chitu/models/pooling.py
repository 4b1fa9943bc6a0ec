"""What a model's folder declares for embeddings and scores: `modules.json` of sentence-transformers, and the modules
that it names. No torch.

Known are its chains for decoders: a transformer, pooling (last token or mean) and, if declared, normalisation; or a
transformer and the score of a token's logits (`LogitScore`). Anything else is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MODULES = "modules.json"


@dataclass(frozen=True, slots=True)
class Pooling:
    mode: Literal["last", "mean", "logits"]
    normalizes: bool = False
    max_tokens: int | None = None
    """Longest prompt that the library computes; None: as long as the model's."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts that go before a text, by name."""
    default_prompt: str = ""
    token_ids: tuple[int, ...] = ()
    """Of `logits`: the id that says yes and, if there is one, the id that says no."""
    is_sigmoid: bool = True
    """Of `logits`: the score is the sigmoid of the logit, or of the difference; else that itself."""


def read_pooling(folder: Path) -> Pooling | str:
    """Return what the folder declares, or the reason why nothing can be served by it."""
    if not (folder / MODULES).is_file():
        return f"the model's folder declares no pooling: it has no {MODULES} (as sentence-transformers writes it)"
    try:
        return _read(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MODULES} of the model's folder, or a module that it names, cannot be read: {error!r}"


def _read(folder: Path) -> Pooling | str:
    modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in _json(folder / MODULES)]
    names = [name for name, _ in modules]
    if names not in (
        ["Transformer", "Pooling"],
        ["Transformer", "Pooling", "Normalize"],
        ["Transformer", "LogitScore"],
    ):
        return f"{MODULES} of the model's folder declares {', '.join(names)}, a chain that is not supported"
    if any(path.startswith("/") or ".." in Path(path).parts for _, path in modules):
        return f"{MODULES} of the model's folder names files outside it"
    more = _json(folder / "config_sentence_transformers.json", {})
    transformer = _json(folder / modules[0][1] / "sentence_bert_config.json", {})
    prompts = {str(name): str(text) for name, text in (more.get("prompts") or {}).items()}
    default = prompts.get(more.get("default_prompt_name") or "", "")
    max_tokens = transformer.get("max_seq_length")
    module = _json(folder / modules[1][1] / "config.json")
    if names[1] == "LogitScore":
        ids = (module["true_token_id"], module.get("false_token_id"))
        token_ids = tuple(int(token) for token in ids if token is not None)
        is_sigmoid = not str(more.get("activation_fn", "")).endswith("Identity")
        return Pooling("logits", False, max_tokens, prompts, default, token_ids, is_sigmoid)
    modes = [name for name, is_on in module.items() if name.startswith("pooling_mode_") and is_on]
    mode = str(module.get("pooling_mode") or (modes[0].removeprefix("pooling_mode_") if len(modes) == 1 else modes))
    known: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
    if mode not in known:
        return f"the pooling {mode} of the model's folder is not supported (only lasttoken and mean)"
    if known[mode] == "mean" and module.get("include_prompt", True) is not True:
        return "the pooling of the model's folder leaves out prompts (include_prompt), which is not supported"
    return Pooling(known[mode], "Normalize" in names, max_tokens, prompts, default)


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.is_file():
        return default
    return json.loads(path.read_text(encoding="utf-8"))
