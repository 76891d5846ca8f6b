"""Pages that a person looks at: of one run, and of many models on many datasets; and the latter's table as text.

run_page.py             the page of a training run: curves.py, pictures.py, scores.py from what run_folder.py reads
comparison_page.py      the page over many models and datasets from what result_set.py reads
score_table.py          its table of models × datasets, with averages over suites
comparison_tables.py    that table, all scores and where they come from as HTML
comparison_charts.py    its figures; bars.py draws those that are no lines
dataset_blocks.py       ranks, calibration, confusion and examples of one model on one dataset
tables.py               the table as LaTeX and Markdown, all scores as CSV
charts.py               lines as SVG, for both pages
page_frame.py           what every page is: one file, with its own security policy
json_lines.py           lines that may be cut short
"""

from eval.report.page import build_comparison
from eval.report.run_page import build_report
from eval.report.tables import as_csv, as_latex, as_markdown

__all__ = ["as_csv", "as_latex", "as_markdown", "build_comparison", "build_report"]
