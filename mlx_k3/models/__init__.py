"""The model as MLX modules."""
