"""Shared fixtures: torch's threads, and the two ends of a transport (`transport_peers.py`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from chitu.errors import MissingDependency

if TYPE_CHECKING:
    from transport_peers import Receiver, Writer


def pytest_collection_finish() -> None:
    """Take half the time from Triton's interpreter, if a test module imported it: integers are added as a GPU does,
    without a check for overflow, and a function that a kernel calls finds the language patched after its first call."""
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is None:
        return
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    first_call, called = interpreter.InterpretedFunction.__call__, set()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        if function.fn in called:
            return function.rewrite()(*arguments, **options)
        called.add(function.fn)
        return first_call(function, *arguments, **options)

    interpreter.InterpretedFunction.__call__ = call


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread while the test runs, whatever an engine of this test or an earlier one set."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def writer(request: pytest.FixtureRequest) -> Iterator[Writer]:
    """Yield this end of the way that a module's parameters name."""
    import torch
    from transport_peers import Writer

    torch.set_num_threads(1)
    if request.param.kind == "cuda_ipc_gpu" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    with pytest.MonkeyPatch.context() as monkeypatch, request.param.opened(monkeypatch) as way:
        try:
            made = Writer(way)
        except MissingDependency as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(error))
        yield made
        made.transport.close()


@pytest.fixture(scope="module")
def receiver(writer: Writer) -> Iterator[Receiver]:
    """Yield a peer that the tests share."""
    made = writer.receiver()
    yield made
    assert made.end() == 0


@pytest.fixture
def own_receiver(writer: Writer) -> Iterator[Receiver]:
    """Yield a peer that a test may stop or kill."""
    made = writer.receiver()
    yield made
    made.process.send_signal(signal.SIGCONT)
    made.end()
