"""Gemma 3 architectures for Poros."""
