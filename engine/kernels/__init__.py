"""Faster forms of what models are made of, put in place of the plain ones."""
