"""`poros new-arch`: the skeleton of a distribution that adds an architecture."""

from poros_cli.new_arch.write import Skeleton, write_skeleton

__all__ = ["Skeleton", "write_skeleton"]
