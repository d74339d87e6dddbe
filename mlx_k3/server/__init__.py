"""OpenAI's HTTP interface to one model."""
