"""The bundled checkpoint."""
