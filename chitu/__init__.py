"""chitu: prefill/decode disaggregated LLM serving."""

__version__ = "0.2.0"
