"""What a body asks: its fields, their decoding, and the prompts and sampling that become of them."""
