"""A client inside a VM: `python rdma_client.py URL KEY`. Standard library alone, so it starts quickly.

Answers each line of its standard input by one JSON line: `{"prompt": ..., "max_tokens": ...}` by `{"status", "text",
"took_s"}`, and `{"path": ...}` by `{"status", "text"}` of a GET.
"""

import json
import sys
import time
import urllib.error
import urllib.request

TIMEOUT_S = 120.0


def ask(url: str, key: str, words: dict[str, object]) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    path = words.pop("path", "/v1/completions")
    body = json.dumps({"temperature": 0, **words}).encode() if words else None
    started_s = time.monotonic()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=TIMEOUT_S) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    except OSError as error:
        status, text = 0, str(error)
    if status == 200 and body is not None:
        text = json.loads(text)["choices"][0]["text"]
    return {"status": status, "text": text, "took_s": time.monotonic() - started_s}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(ask(*sys.argv[1:], json.loads(line))), flush=True)
