"""Qwen2.5, Qwen3 and Qwen3.5 architectures for Poros."""
