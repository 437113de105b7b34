"""What `poros doctor` finds out, in the order in which it is shown."""

from poros_cli.doctor.facts import collect_facts
from poros_cli.doctor.table import show_facts

__all__ = ["collect_facts", "show_facts"]
