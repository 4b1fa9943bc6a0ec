"""Made-up tasks whose answers can be checked: what chitu-tiny is trained on, tested with and shown with."""
