"""A chat template by which a fake worker, which repeats its prompt, answers as its test says: the last user's message
and an eos, behind which is everything else of the chat."""

from __future__ import annotations

_CALLS = "{% if message.tool_calls %}{{ message.tool_calls[0].function.arguments | tojson }} {% endif %}"
HERMES = '<tool_call> {"name": ..., "arguments": ...} </tool_call> <think> </think>'
"""Marks by which the format of calls is found."""
SCRIPT = (
    f"{{#- {HERMES} -#}}"
    "{%- if enable_thinking is defined %}{% endif %}{% for message in messages %}"
    '{% if message.role == "user" and loop.last %}{{ message.content }}{% endif %}{% endfor %}{{ eos_token }}'
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
    "{{ message.content }} {{ message.tool_calls | tojson if message.tool_calls }}{% endfor %}"
)
SCRIPT_WITH_CALLS = SCRIPT.replace("{% endif %}{% endfor %}{{ eos", f"{{% endif %}}{_CALLS}{{% endfor %}}{{{{ eos")
"""The same with the arguments of calls that are sent back ahead of the message."""
