"""From a parsed request to the bytes of its answer, streamed or whole, also after its router has ended."""
