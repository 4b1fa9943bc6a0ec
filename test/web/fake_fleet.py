"""The page over a made-up cluster of any size, without a router: its files come from the checkout, the events of its
stream from the test. Used by the tests and by `script/screenshots.py`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from chat_page import ChatPage
from playwright.sync_api import Route

WEB_DIR = Path(__file__).resolve().parents[2] / "chitu" / "http" / "fleet" / "web"
URL = "http://fleet.invalid"
ROLES = {"P": "prefill", "D": "decode", "U": "unified", "E": "encode"}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

FEED = """() => {
    const [realFetch, realParse] = [globalThis.fetch, JSON.parse];
    let controller;
    globalThis.fetch = (path, options) => {
        if (!String(path).includes("cluster/events")) return realFetch(path, options);
        return Promise.resolve(new Response(new ReadableStream({ start: (one) => { controller = one; } })));
    };
    const encoder = new TextEncoder();
    globalThis.feed = async (event) => {
        while (!controller) await new Promise((resolve) => setTimeout(resolve, 5));
        // The page draws an event in the turn in which it parses it: what is queued there comes after.
        const drawn = new Promise((resolve) => {
            JSON.parse = (text) => {
                if (text === event) queueMicrotask(resolve);
                return realParse(text);
            };
        });
        controller.enqueue(encoder.encode(`data: ${event}\\n\\n`));
        await drawn;
    };
}"""


class FakeFleet:
    """A cluster of `num_prefill` P and `num_decode` D, and what an event stream says of it."""

    def __init__(self, num_prefill: int, num_decode: int, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.time_s = 1000.0
        self.advice, self.model = "", "Qwen3-32B"
        self.first_prompt = {"text": "What is the capital of France?", "is_chat": True}
        names = [f"P{rank}" for rank in range(num_prefill)] + [f"D{rank}" for rank in range(num_decode)]
        self.instances: dict[str, dict[str, Any]] = {name: self._instance(name) for name in names}
        self.requests: list[dict[str, Any]] = []
        self._sent: dict[str, str] = {}

    def _instance(self, name: str) -> dict[str, Any]:
        load = {"pages_total": 4096, "tokens": 1_000_000, "bytes_moved": 2**33, "steps": 1000}
        fixed = {
            "name": name,
            "role": ROLES[name[0]],
            "status": "up",
            "home": "",
            "host": f"10.0.{name[1:]}.1",
            "pid": 4242,
        }
        return {**fixed, "becomes": "", "incarnation": str(self.rng.getrandbits(60)), "load": load}

    def pick(self, letter: str) -> str:
        return self.rng.choice([name for name, one in self.instances.items() if name[0] == letter and one["load"]])

    def work(self, share: float, dt_s: float = 0.5) -> None:
        """Let time pass and give each instance some of `share` (0 to 1) of what it can take."""
        self.time_s += dt_s
        for name, one in self.instances.items():
            if one["status"] == "down":
                continue
            much = min(1.0, self.rng.lognormvariate(0.0, 0.6) * share)
            load = dict(one["load"])
            if name[0] == "P":
                load |= {"waiting": int(9 * much**2), "running": int(much > 0.1), "transferring": int(2 * much)}
                load["tokens"] += int(30_000 * much * dt_s)
            else:
                load |= {"waiting": int(3 * max(0.0, much - 0.9) * 10), "running": int(40 * much), "transferring": 0}
                load |= {"pages_used": int(4096 * much * 0.97)}
                load["tokens"] += int(2_000 * much * dt_s)
            one["load"] = load

    def request(self, prefill: str, decode: str, state: str, age_s: float = 0.4, **more: Any) -> dict[str, Any]:
        """Add a request. One with its first token has been computed and has its KV on D."""
        room = f"{self.rng.getrandbits(128):032x}"
        created = self.time_s - age_s
        is_over = state not in ("prefill", "decode")
        stages = {"admission_s": 0.002, "queue_s": 0.1, "compute_s": 0.4, "transfer_s": 0.02}
        stages |= {"first_step_s": 0.01, "decode_s": 1.1, "messages_s": 0.01}
        made = {
            **{"room": room, "request_id": room, "prefill": prefill, "decode": decode, "state": state, "error": ""},
            **{"prompt_tokens": self.rng.randrange(200, 4000), "output_tokens": 0 if state == "prefill" else 40},
            **{"created_at_s": created, "first_token_at_s": None if state == "prefill" else created + age_s / 2},
            **{"ended_at_s": self.time_s if is_over else None, "kv_bytes": 0, "stages": stages if is_over else None},
            **{"attempt": 1, "cached_tokens": 0, **more},
        }
        self.requests.append(made)
        return made

    def lose(self, name: str) -> None:
        self.instances[name] |= {"status": "down", "load": None}

    def leave(self, name: str) -> None:
        del self.instances[name]

    def join(self, name: str) -> None:
        self.instances[name] = self._instance(name)

    def event(self, *, is_whole: bool = True) -> str:
        """Return the JSON of an event; not whole: with the instances that changed since the last one."""
        encoded = {name: json.dumps(one) for name, one in self.instances.items()}
        changed = [name for name, text in encoded.items() if is_whole or self._sent.get(name) != text]
        self._sent = encoded
        return json.dumps(
            {
                **{"model": self.model, "version": "0.1.0", "max_model_len": 32768, "page_size": 16},
                **{"transport": "mooncake", "time_s": self.time_s, "router_incarnation": "1", "advice": self.advice},
                "in_flight": sum(one["ended_at_s"] is None for one in self.requests),
                "first_prompt": self.first_prompt,
                "is_whole": is_whole,
                "instances": [self.instances[name] for name in changed],
                **{"requests": self.requests, "workers": []},
            }
        )


def show_fleet(page: ChatPage, fleet: FakeFleet) -> None:
    """Open the page, live, over the fleet."""

    def serve(route: Route) -> None:
        path = route.request.url.removeprefix(URL).split("#")[0]
        file = WEB_DIR / ("index.html" if path == "/" else path.removeprefix("/web/"))
        if file.is_file():
            route.fulfill(body=file.read_bytes(), headers={"content-type": TYPES[file.suffix]})
        else:
            route.fulfill(status=404, json={"error": {"code": "not_found", "message": "a fleet has no such route"}})

    page.context.add_init_script(f"({FEED})()")
    page.context.route("**/*", serve)
    page.open()
    feed(page, fleet)
    page.expect_connection("live")


def feed(page: ChatPage, fleet: FakeFleet, *, is_whole: bool = True) -> int:
    """Send an event of the fleet to the page, return its size when the page has drawn it."""
    event = fleet.event(is_whole=is_whole)
    page.page.evaluate("(event) => feed(event)", event)
    return len(event)
