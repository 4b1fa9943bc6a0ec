"""One completion from a cluster that has just started: what `script/quickstart.sh` prints first."""

from __future__ import annotations

import http.client
import json
import time

from chitu.errors import Internal
from chitu.launch.local import LocalCluster

PROMPT = "Once upon a time"


def first_completion(cluster: LocalCluster) -> None:
    """Ask for 16 tokens, print the answer. Internal where the answer is no completion."""
    connection = http.client.HTTPConnection(cluster.host, cluster.ports["port"], timeout=60.0)
    model = cluster.topology.model
    try:
        connection.request("GET", "/v1/models")
        name = json.loads(connection.getresponse().read())["data"][0]["id"]
        body = {"model": name, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        start_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        if reply.status != 200:
            raise Internal(f"the first completion got {reply.status}: {answer}")
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise Internal(f"the first completion of {model.path} failed: {error!r}") from error
    finally:
        connection.close()
    usage = answer["usage"]
    print(f"prompt:     {PROMPT!r} ({usage['prompt_tokens']} tokens)")
    print(f"completion: {answer['choices'][0]['text']!r} ({usage['completion_tokens']} tokens)")
    print(f"in {time.monotonic() - start_s:.2f} s", flush=True)
