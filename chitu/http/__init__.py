"""All that speaks HTTP, in rooms. Upper may use lower; rooms of one line do not know each other (`pyproject.toml`).

* `api_document`, `table`: the cold routes' application; the APIs and the bodies of all routes.
* `dialects/`: an API of each vendor; `fleet/`: what shows and changes the cluster, and the page; `batch/`: files and
  batches.
* `answer/`: from a parsed request to the bytes of its answer.
* `ask/`: from a body to a parsed request.
* `messages/`: the parts of a message (calls, reasoning) in a model's text.
* `wire/`: the server, its connections, and who may call it; HTTP itself, without an API.

Start at `answer/generate.py:GenerationRoutes.answer`: a request passes through it from its body to its last event.
"""
