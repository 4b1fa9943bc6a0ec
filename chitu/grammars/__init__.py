"""Grammars that answers must follow: their compilation, and masks of the next tokens. Imports no torch."""

from chitu.grammars.compiler import CompiledGrammar, GrammarCompiler, Matcher
from chitu.grammars.store import GrammarStore

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarStore", "Matcher"]
