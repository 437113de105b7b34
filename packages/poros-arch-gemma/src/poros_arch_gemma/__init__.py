"""Gemma 3 and Gemma 4 dense architectures for Poros."""
