"""Gemma architectures for Poros. None is registered yet; see `poros_arch_gemma.plugin`."""
