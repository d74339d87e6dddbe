"""From release shards to an MLX package."""
