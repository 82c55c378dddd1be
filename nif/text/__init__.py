"""Conversion between text and tokens: tokenizers, chat templates, and parsing of answers."""
