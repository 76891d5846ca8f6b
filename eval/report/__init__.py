"""Reports of scores: HTML pages, text tables, and tables for the terminal.

run_page           the page of a training run, from what ``read`` finds in its folder
comparison_page    the page over many models and datasets, from a ``result_set``
scores             its table of models × datasets, with averages over suites
comparison_charts  its charts
dataset_blocks     its details: one model on one dataset
charts, images     line charts, bars and scatter plots; thumbnails and the panels made of them
tables             the table as LaTeX and Markdown, all scores as CSV
terminal           tables for the terminal
templates/         the markup, styles and script of the pages
"""

from eval.report.comparison_page import build_comparison
from eval.report.run_page import build_report
from eval.report.tables import as_csv, as_latex, as_markdown

__all__ = ["as_csv", "as_latex", "as_markdown", "build_comparison", "build_report"]
