"""The model's operations."""
