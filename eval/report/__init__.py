"""Reports of scores.

command          the command ``report``
tables           the table of models × datasets, and all scores as CSV, LaTeX and Markdown
run_page         the page of a training run
comparison_page  the page over many models and datasets
charts           charts, thumbnails and numbers of the pages
terminal         tables for the terminal
templates/       markup, styles and script of the pages
"""

from eval.report.comparison_page import build_comparison
from eval.report.run_page import build_report
from eval.report.tables import as_csv, as_latex, as_markdown

__all__ = ["as_csv", "as_latex", "as_markdown", "build_comparison", "build_report"]
