"""From a trained adapter to something that other programs load: merged weights, and the proof of what they answer."""

from poros.export.adapter import Adapter, find_adapter
from poros.export.fitting import AdaptedModel, open_with_adapter
from poros.export.merging import BASES, MergeReport, merge

__all__ = ["BASES", "AdaptedModel", "Adapter", "MergeReport", "find_adapter", "merge", "open_with_adapter"]
