"""Text to token ids and back: chat template, encoding, incremental detokenising, stop strings. Used by the router.

Imports neither torch nor (unless a checkpoint has no tokenizer.json) transformers, whose import takes seconds.
"""

from chitu.tokenizer.core import Tokenizer
from chitu.tokenizer.detokenizer import Detokenizer
from chitu.tokenizer.stop import StopScanner

__all__ = ["Detokenizer", "StopScanner", "Tokenizer"]
