"""Small HTTP client of the integration tests: token-id prompts in, token ids out."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    text: str
    finish_reason: str
    usage: dict[str, Any]


def leave_early(url: str, prompts: list[list[int]], longest_s: float, max_tokens: int) -> None:
    """Send streaming requests, 20 at a time, and leave each after a random time of at most `longest_s`."""
    rng = random.Random(11)

    async def visit(client: httpx.AsyncClient, prompt: list[int], patience_s: float) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s), client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    pass

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
            for start in range(0, len(prompts), 20):
                some = prompts[start : start + 20]
                await asyncio.gather(*[visit(client, prompt, rng.uniform(0.0, longest_s)) for prompt in some])

    asyncio.run(run())


async def _complete(client: httpx.AsyncClient, prompt: list[int] | str, options: dict[str, Any]) -> Completion:
    body = {"model": "m", "prompt": prompt, "return_token_ids": True, **options}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    answer = response.json()
    choice = answer["choices"][0]
    return Completion(choice["token_ids"], choice["text"], choice["finish_reason"], answer["usage"])


def complete_all(url: str, prompts: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
    """Send all requests at once; return the answers in order."""

    async def run() -> list[Completion]:
        limits = httpx.Limits(max_connections=len(prompts))
        async with httpx.AsyncClient(base_url=url, timeout=150.0, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*[_complete(client, p, o) for p, o in zip(prompts, options, strict=True)])

    return asyncio.run(run())


def instance_loads(url: str) -> dict[str, dict[str, int]]:
    """Return the newest load report of each instance by name: the fields of `LoadReport`. An instance that is away has
    none."""
    instances = httpx.get(f"{url}/cluster", timeout=5.0, trust_env=False).json()["instances"]
    return {instance["name"]: instance["load"] for instance in instances if instance["load"] is not None}


def is_whole(load: dict[str, int]) -> bool:
    """Return whether nothing runs, every page is free or cached and every row is free."""
    busy = load["waiting"] + load["transferring"] + load["running"] + load["retracted"] + load["pages_quarantined"]
    return (
        busy == 0
        and load["pages_free"] + load["pages_cached"] == load["pages_total"]
        and load["aux_free"] == load["aux_total"]
        and load["states_free"] == load["states_total"]
    )
