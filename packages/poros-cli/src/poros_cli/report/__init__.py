"""The page that `poros report` writes about a run."""

from poros_cli.report.page import write_report
from poros_cli.report.run_files import RunFiles, read_run

__all__ = ["RunFiles", "read_run", "write_report"]
