"""Replies that follow a grammar: compiled at admission, then a mask of allowed tokens for each step."""

from penstock.engine.structured.compiler import GrammarCompiler
from penstock.engine.structured.grammar import Grammar, GrammarFailed, Matcher
from penstock.engine.structured.vocabulary import Vocabulary

__all__ = ["Grammar", "GrammarCompiler", "GrammarFailed", "Matcher", "Vocabulary"]
