"""Files and batches: lines of a file, each a request like a client's."""
