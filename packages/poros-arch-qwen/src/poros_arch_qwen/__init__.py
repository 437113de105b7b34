"""Qwen2.5 and Qwen3 architectures for Poros."""
