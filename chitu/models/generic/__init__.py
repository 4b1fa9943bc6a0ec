"""Any decoder of the installed `transformers`, computed by its own modules over our pages."""
