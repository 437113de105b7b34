"""Plugin module."""
