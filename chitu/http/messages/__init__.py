"""Parsing of an assistant's text into reasoning, content and tool calls. Pure; the chat template tells the formats."""
