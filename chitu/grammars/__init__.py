"""Answers that must follow a grammar: compiling, and which tokens may come next. Imports no torch."""

from chitu.grammars.compiler import CompiledGrammar, GrammarCompiler, Matcher
from chitu.grammars.store import GrammarStore

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarStore", "Matcher"]
