"""The APIs, each a folder: bodies, their way to a request, answers, errors. `table.py` above has a row of each."""
