"""An assistant's text as a message: reasoning, content, tool calls. Pure; found out by the chat template's text."""
