"""Tokenizer, chat format and conversation."""
