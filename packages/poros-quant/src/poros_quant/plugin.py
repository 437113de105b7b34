"""The plugin that registers the built-in weight formats."""
