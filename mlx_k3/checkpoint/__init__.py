"""Reading and writing checkpoints: names, indexes, headers, bytes. No MLX here."""
