"""One completion from a cluster that has just started, the first output of `script/quickstart.sh`.

The embedded model must recall one fact of a long list, which is only possible if every page of the prompt's KV cache
arrived. Any other model answers a question or, without a chat template, continues a sentence. Below the answer are the
pair that served it, the bytes moved, and the times.
"""

from __future__ import annotations

import random
from typing import Any

from chitu.assets import TINY_MODEL_NAME
from chitu.errors import ChituError, Internal
from chitu.launch.display import chitu_command
from chitu.launch.host import HostProcesses
from chitu.launch.packaged_models import PACKAGED
from chitu.launch.router_client import Answer, RouterClient
from chitu.tools.chat import CHAT_PATH, is_right, printable, recall_example, shortened, verdict
from chitu.tools.trace import find_request, trace_lines

COMPLETION_PATH = "/v1/completions"
LIST_TOKENS = 1000
SEED = 0
"""Seed of the list and question. They are the same every time, so a wrong answer is the cluster's fault, not one of the
model's rare errors."""
MAX_TOKENS = 32
"""Limit of the answer; a sentence of chitu-tiny has about 12."""


def first_completion(cluster: HostProcesses, *, must_be_right: bool = False) -> None:
    """Send a request, print the answer and its trace. Raise Internal if there is none, or it must be right and is
    not."""
    keys = cluster.topology.dp_config.router.api_keys
    client = RouterClient(cluster.url, keys[0] if keys else None)
    try:
        model = client.model_name()
        if model == TINY_MODEL_NAME:
            _recall(client, model, must_be_right)
        else:
            _continue(client, model)
    except ChituError as error:
        raise Internal(f"the first completion failed: {error.code}: {error.message}") from error


def _recall(client: RouterClient, model: str, must_be_right: bool) -> None:
    example = recall_example(random.Random(SEED), LIST_TOKENS, client.cluster().max_model_len)
    _tell("question", shortened(example.prompt))
    messages = [{"role": "user", "content": example.prompt}]
    answer = _ask(client, CHAT_PATH, model, {"messages": messages, "max_tokens": MAX_TOKENS})
    _tell("answer", printable(answer.text))
    _tell("", verdict(example, answer.text))
    _tell_trace(client, answer)
    for name, packaged in PACKAGED.items():
        _tell("", f"a published model: {chitu_command()} serve --model {name}  ({packaged.about})")
    if must_be_right and not is_right(example, answer.text):
        raise Internal(f"{model} answered {answer.text!r} where {example.value} is right")


def _continue(client: RouterClient, model: str) -> None:
    body: dict[str, Any]
    first = client.cluster().first_prompt
    if first.is_chat:
        path, shown, body = CHAT_PATH, ("question", "answer"), {"messages": [{"role": "user", "content": first.text}]}
    else:
        path, shown, body = COMPLETION_PATH, ("prompt", "completion"), {"prompt": first.text}
    answer = _ask(client, path, model, {**body, "max_tokens": MAX_TOKENS})
    for name, text in zip(shown, (first.text, answer.text), strict=True):
        _tell(name, printable(text) if first.is_chat else repr(text))
    _tell_trace(client, answer)


def _ask(client: RouterClient, path: str, model: str, body: dict[str, Any]) -> Answer:
    """Return the whole answer. Raise its error."""
    answer = client.stream(path, {"model": model, "temperature": 0, **body}, lambda text: None)
    if answer.is_stopped:
        raise KeyboardInterrupt
    if answer.error is not None:
        raise answer.error
    return answer


def _tell_trace(client: RouterClient, answer: Answer) -> None:
    request = find_request(client.cluster(), answer.request_id)
    if request is None:
        raise Internal(f"the router has no record of the request {answer.request_id}")
    for name, line in zip(("served by", ""), trace_lines(request), strict=False):
        _tell(name, line)


def _tell(name: str, text: str) -> None:
    print(f"{name + ':' if name else '':11} {text}", flush=True)
