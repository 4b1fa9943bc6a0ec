"""Parsing of an assistant's text into reasoning, content and tool calls. Pure; formats come from the chat template."""

from __future__ import annotations
