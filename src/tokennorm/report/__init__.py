"""What came of a run, as one HTML page: reads run folders only, so it needs no library and no model."""

from tokennorm.report.page import page
from tokennorm.report.runs import Run, read_run
from tokennorm.report.write import write_report

__all__ = ["Run", "page", "read_run", "write_report"]
