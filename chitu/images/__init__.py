"""Images before they are tensors: their files, how many rows they take in a prompt, and the patches that a model's
vision tower reads. Imports neither torch nor transformers, except in processes of its own."""
