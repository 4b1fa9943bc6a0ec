"""All that speaks HTTP, in rooms. Upper may use lower; rooms of one line do not know each other (`pyproject.toml`).

* `table`, `api_document`: the APIs and the bodies of all routes; the application of the cold routes.
* `dialects/`: the API of each vendor, one object each; `fleet/`: what shows and changes the cluster, and the page;
  `batch/`: files and batches.
* `answer/`: from a parsed request to the bytes of its answer.
* `ask/`: from a body to a parsed request.
* `messages/`: the parts of a message (calls, reasoning) in a model's text.
* `wire/`: HTTP itself, which knows no API: the server, its connections, and who may call it.

Start at `answer/generate.py:GenerationRoutes.answer`: a request passes through it from its body to its last event. What
an API is says `answer/dialect.py`.
"""
