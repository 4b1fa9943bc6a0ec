"""Send greedy requests to a router, over and over, until standard input ends: `load_client.py URL CONCURRENCY`.

Run by `test_two_nodes.py` on the login machine. Writes a JSON line for each answer as it comes: `{"prompt": 3,
"seconds": 0.2, "token_ids": [...]}`, or with `error` in place of the tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time

import httpx

PROMPTS = [[11 * n + k % 97 + 1 for k in range(40 + 30 * n)] for n in range(6)]
MAX_TOKENS = 12


async def ask(client: httpx.AsyncClient, prompt: int) -> None:
    start_s = time.monotonic()
    body = {"prompt": PROMPTS[prompt], "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    try:
        response = await client.post("/v1/completions", json={"model": "m", **body})
        response.raise_for_status()
        answer = {"token_ids": response.json()["choices"][0]["token_ids"]}
    except (httpx.HTTPError, LookupError, ValueError) as error:
        answer = {"error": repr(error)}
    print(json.dumps({"prompt": prompt, "seconds": time.monotonic() - start_s, **answer}), flush=True)


async def load(url: str, concurrency: int) -> None:
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    turns = itertools.cycle(range(len(PROMPTS)))

    async def client_of_many(client: httpx.AsyncClient) -> None:
        while not ended.done():
            await ask(client, next(turns))

    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        await asyncio.gather(*[client_of_many(client) for _ in range(concurrency)])


asyncio.run(load(sys.argv[1], int(sys.argv[2])))
