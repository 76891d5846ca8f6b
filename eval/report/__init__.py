"""Pages that a person looks at: of one run, and of many models on many datasets; and the same as plain tables."""

from eval.report.comparison_page import build_comparison
from eval.report.run_page import build_report
from eval.report.tables import as_csv, as_latex, as_markdown

__all__ = ["as_csv", "as_latex", "as_markdown", "build_comparison", "build_report"]
