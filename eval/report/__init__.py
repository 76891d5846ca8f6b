"""Pages that a person looks at: of one run, and of many models on many datasets."""

from eval.report.run_page import build_report

__all__ = ["build_report"]
