"""Parts of `script/train_tiny.py`: the documents, the model, the checkpoint, the report."""
